// Labels as numbers: `input[0][mask]` is made once and then costs a comparison. Bounded: past the limit (a model whose
// dictionaries have ever new keys) a label ends in `[...]`.
#pragma once

#include <Python.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nanwatch {

class Labels {
 public:
  using Id = int32_t;
  static constexpr Id kInput = 0, kOutput = 1;

  Labels() { of_text("input"), of_text("output"); }
  Labels(const Labels&) = delete;
  Labels& operator=(const Labels&) = delete;
  ~Labels() {
    for (Label& label : labels_) forget_keys(&label);
  }

  // The reference stays valid while labels are added.
  const std::string& text(Id id) const { return labels_[size_t(id)].text; }
  size_t size() const { return labels_.size(); }

  Id of_text(const std::string& text) {
    const auto known = ids_.find(text);
    if (known != ids_.end()) return known->second;
    if (labels_.size() < kLimit) return add(text);
    const std::string shortened = text.substr(0, text.rfind('[')) + "[...]";
    const auto known_short = ids_.find(shortened);
    if (known_short != ids_.end()) return known_short->second;
    return labels_.size() < 2 * kLimit ? add(shortened) : kInput;  // as many containers as labels: no model has those
  }

  // The label of an item of a sequence.
  Id item(Id parent, int64_t index) {
    Label& container = labels_[size_t(parent)];
    if (size_t(index) < container.items.size()) return container.items[size_t(index)];
    const Id id = of_text(container.text + "[" + std::to_string(index) + "]");
    if (size_t(index) == container.items.size()) container.items.push_back(id);
    return id;
  }

  // The label of an item of a mapping. `key` is a str; `spell` gives the text between the brackets (Python's rule), or
  // nothing with an exception set. A model may make its keys anew in every call: the string objects are let go at
  // times, and only the text is kept for good.
  template <typename Spell>
  std::optional<Id> item(Id parent, PyObject* key, const Spell& spell) {
    Label& container = labels_[size_t(parent)];
    // Calls name their arguments in the order of the call before.
    if (container.next < container.keys.size() && container.keys[container.next].first == key) [[likely]]
      return container.keys[container.next++].second;
    for (size_t i = 0; i < container.keys.size(); ++i) {
      if (container.keys[i].first != key) continue;
      container.next = i + 1;
      return container.keys[i].second;
    }
    const std::optional<std::string> spelt = spell(key);
    if (!spelt.has_value()) return std::nullopt;
    const Id id = of_text(container.text + "[" + *spelt + "]");
    if (container.keys.size() >= kMostKeys) forget_keys(&container);
    // While it is held, no other string can have its address.
    container.keys.emplace_back(Py_NewRef(key), id);
    return id;
  }

 private:
  static constexpr size_t kLimit = 1 << 16;  // labels
  static constexpr size_t kMostKeys = 256;   // of a container

  struct Label {
    std::string text;
    std::vector<Id> items;
    std::vector<std::pair<PyObject*, Id>> keys;  // owned
    size_t next = 0;                             // the key that is expected
  };

  static void forget_keys(Label* container) {
    // The destructor of a key, of a subclass of str, may run Python code that calls this function again.
    const auto forgotten = std::exchange(container->keys, {});
    for (const auto& [key, id] : forgotten) Py_DECREF(key);
  }

  Id add(const std::string& text) {
    labels_.push_back({text, {}, {}});
    return ids_[text] = Id(labels_.size() - 1);
  }

  std::deque<Label> labels_;
  std::unordered_map<std::string, Id> ids_;
};

}  // namespace nanwatch
