// Labels as numbers: `input[0][mask]` is made once and then costs a table look-up. Bounded: past the limit (a model
// whose dictionaries have ever new keys) a label ends in `[...]`.
#pragma once

#include <Python.h>

#include <cstdint>
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

  Labels() : texts_{"input", "output"} {}
  Labels(const Labels&) = delete;
  Labels& operator=(const Labels&) = delete;
  ~Labels() { forget_keys(); }

  const std::string& text(Id id) const { return texts_[size_t(id)]; }

  Id of_text(const std::string& text) {
    const auto found = by_text_.find(text);
    if (found != by_text_.end()) return found->second;
    const Id id = add(text, text.substr(0, text.rfind('[')) + "[...]");
    if (texts_[size_t(id)] == text) by_text_.emplace(text, id);
    return id;
  }

  Id item(Id parent, int64_t index) {
    if (parent == kInput && index < kFewInputs && inputs_[index] != kInput) return inputs_[index];
    const uint64_t key = (uint64_t(parent) << 32) | uint64_t(uint32_t(index));
    const auto found = items_.find(key);
    if (found != items_.end()) return found->second;
    const Id id = add(texts_[size_t(parent)] + "[" + std::to_string(index) + "]", texts_[size_t(parent)] + "[...]");
    if (!full()) items_.emplace(key, id);
    if (parent == kInput && index < kFewInputs) inputs_[index] = id;
    return id;
  }

  // `key` is a str; `spell` gives the text between the brackets (Python's rule), or nothing with an exception set. A
  // model may build its keys anew in every call, so what is kept for good is the text; the string objects only save
  // spelling it, and are let go at times.
  template <typename Spell>
  std::optional<Id> item(Id parent, PyObject* key, const Spell& spell) {
    const auto found = named_.find({parent, key});
    if (found != named_.end()) return found->second;
    const std::optional<std::string> spelt = spell(key);
    if (!spelt.has_value()) return std::nullopt;
    const std::string& stem = texts_[size_t(parent)];
    const std::string text = stem + "[" + *spelt + "]";
    const auto known = by_text_.find(text);
    const Id id = known != by_text_.end() ? known->second : add(text, stem + "[...]");
    if (known == by_text_.end() && texts_[size_t(id)] == text) by_text_.emplace(text, id);
    if (named_.size() >= kMaxKeys) forget_keys();
    // While it is held, no other string can have its address. Another thread may have been first.
    if (named_.emplace(Named{parent, key}, id).second) Py_INCREF(key);
    return id;
  }

  size_t size() const { return texts_.size(); }

 private:
  static constexpr size_t kLimit = 1 << 16;  // texts
  static constexpr size_t kMaxKeys = 1 << 12;
  static constexpr int64_t kFewInputs = 8;

  struct Named {
    Id parent;
    PyObject* key;
    bool operator==(const Named& other) const { return parent == other.parent && key == other.key; }
  };
  struct HashNamed {
    size_t operator()(const Named& n) const {
      return size_t((reinterpret_cast<uintptr_t>(n.key) ^ uint64_t(n.parent)) * 0x9e3779b97f4a7c15ull >> 16);
    }
  };

  void forget_keys() {
    // The destructor of a key, of a subclass of str, may run Python code that calls this function again.
    const auto forgotten = std::exchange(named_, {});
    for (const auto& entry : forgotten) Py_DECREF(entry.first.key);
  }

  bool full() const { return texts_.size() >= kLimit; }

  Id add(std::string text, const std::string& when_full) {
    if (full()) {
      const auto found = overflow_.find(when_full);
      if (found != overflow_.end()) return found->second;
      if (texts_.size() >= 2 * kLimit) return kInput;  // as many stems as labels: no model looks like this
      texts_.push_back(when_full);
      return overflow_[when_full] = Id(texts_.size() - 1);
    }
    texts_.push_back(std::move(text));
    return Id(texts_.size() - 1);
  }

  std::vector<std::string> texts_;
  Id inputs_[kFewInputs] = {};  // labels of the first positional arguments, once they are made
  std::unordered_map<uint64_t, Id> items_;
  std::unordered_map<Named, Id, HashNamed> named_;
  std::unordered_map<std::string, Id> by_text_, overflow_;
};

}  // namespace nanwatch
