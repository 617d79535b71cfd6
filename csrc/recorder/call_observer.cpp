#include "recorder/call_observer.h"

#include "recorder/cached_read.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// The limits of python/nanwatch/recording/walk.py; the tests hold the two walks against each other.
constexpr int64_t kMaxLeaves = 4096;
constexpr int kMaxDepth = 32;
constexpr Py_ssize_t kMaxScalars = 64;

bool is_scalar(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value) ||
         PyBytes_Check(value);
}

// An attribute of a module, as a rule from its `__dict__`: the way over `nn.Module.__getattr__` is five times as long.
py::object attribute_of(PyObject* module, PyObject* name) {
  const py::object attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  PyObject* const value =
      attributes && PyDict_Check(attributes.ptr()) ? PyDict_GetItemWithError(attributes.ptr(), name) : nullptr;
  if (value != nullptr) [[likely]]
    return py::reinterpret_borrow<py::object>(value);
  PyErr_Clear();
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(module, name));
}

bool is_training(PyObject* module) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  const py::object flag = attribute_of(module, training);
  if (!flag) PyErr_Clear();
  return flag.ptr() != Py_False;
}

}  // namespace

CallObserver::~CallObserver() {
  for (const auto& entry : kinds_) Py_DECREF(reinterpret_cast<PyObject*>(entry.first));
}

// ---- one tensor -----------------------------------------------------------------------------------------------------

RangeRow CallObserver::read(const at::Tensor& x, const View& view) {
  ++counters.tensors_read;
  const int64_t bytes = view.numel * int64_t(word_size(view.format));
  counters.bytes_read += bytes;
  return read_released(x, view, bytes, [](const View& held) { return range_cpu(held); });
}

RangeRow CallObserver::hit(const CacheEntry& entry, const View& view) {
  ++counters.cache_hits;
  if (options_.verify_hits) [[unlikely]] {
    const RangeRow again = range_cpu(view);
    counters.stale_hits += again.abs_min != entry.abs_min || again.abs_max != entry.abs_max;
  }
  return entry.range();
}

struct CallObserver::HostReader {
  CallObserver& self;
  const at::Tensor& x;
  const View& view;
  bool is_urgent = false, is_refused = false;

  RangeRow read() { return self.read(x, view); }
  // The kernel reads elements that a view repeats once.
  int64_t bytes() const {
    return std::min(view.numel * int64_t(word_size(view.format)), int64_t(x.storage().nbytes()));
  }
  bool knows(const CacheEntry& entry) const { return !entry.is_pending; }
  RangeRow hit(const CacheEntry& entry) { return self.hit(entry, view); }
  bool keeps(const RangeRow& row) const { return row.isfinite; }
};

void CallObserver::unread(Labels::Id label, Role role, const std::string& reason, OpenFrame* frame) {
  if (PyObject* const record = unread_record(labels_.text(label), role, reason))
    frame->add({label, role, NoteKind::none, -1, 0, 0, kNotPending, {}, record});
}

// Turns an exception of reading a value into the value's record. Returns false for one that must end the call; it stays
// set.
bool CallObserver::excuse(Labels::Id label, Role role, OpenFrame* frame) {
  const std::optional<std::string> reason = excuse_error();
  if (reason.has_value()) unread(label, role, *reason, frame);
  return reason.has_value();
}

bool CallObserver::record_from_python(PyObject* value, Labels::Id label, Role role, const Node& node,
                                      OpenFrame* frame) {
  const OutsideCompiler outside;
  const py::object text = from_utf8(labels_.text(label)), role_text = from_utf8(role_name(role));
  PyObject* record = PyObject_CallFunctionObjArgs(helpers_.observe.ptr(), value, text.ptr(), role_text.ptr(),
                                                  node.allow_inf.ptr(), py::int_(frame->batch).ptr(), nullptr);
  if (record == nullptr) return excuse(label, role, frame);
  frame->add({label, role, NoteKind::none, -1, 0, 0, kNotPending, {}, record});
  frame->has_nonfinite |= is_nonfinite(frame->records.back());
  return true;
}

bool CallObserver::tensor(PyObject* object, Labels::Id label, Role role, const Node& node, Memory memory,
                          Node::Slot* slot, OpenFrame* frame) {
  if (frame->candidates != nullptr && THPVariable_Unpack(object).requires_grad())
    frame->candidates->push_back({THPVariable_Unpack(object), label, role});
  if (frame->reads_all) memory = Memory::none;
  View view;
  const bool is_pythons = has_turns_ && options_.is_pythons(role, frame->batch);
  const bool may_wait = may_be_pending_ && !is_pythons;
  if (table_ != nullptr && may_wait && device_tensor(object, label, role, memory, slot, frame)) [[unlikely]]
    return true;
  if (!may_wait || !plain_view(object, &view) || view.dims > 255) [[unlikely]] {
    // The first tensor of a device: until then the devices cost nothing.
    if (may_wait && table_ == nullptr && meets_device(object) &&
        device_tensor(object, label, role, memory, slot, frame))
      return true;
    ++counters.tensors;
    ++counters.tensors_read;
    return record_from_python(object, label, role, node, frame);
  }
  const at::Tensor& x = THPVariable_Unpack(object);
  if (!masks_.empty() && !frame->reads_all && known_mask(x, label, role, frame)) [[unlikely]]
    return true;
  // Taken before the read: another thread may give the tensor other sizes while the lock is released.
  RecordData record{
      label,       role, NoteKind::none, int8_t(x.scalar_type()), uint8_t(view.dims), uint32_t(frame->shapes.size()),
      kNotPending, {},   nullptr};
  frame->shapes.insert(frame->shapes.end(), view.sizes, view.sizes + view.dims);
  HostReader reader{*this, x, view};
  record.range = range_of<RangeRow>(object, frame->batch, memory, slot, reader);
  if (reader.is_refused) [[unlikely]] {
    frame->shapes.resize(record.shape_at);
    return not_read_yet(label, role, frame);
  }
  // Zeros and the largest number there is: perhaps an additive attention mask, which Python recognises.
  const bool may_be_mask = record.range.abs_min == 0.0 && (role == Role::input || role == Role::buffer) &&
                           word_size(view.format) > 1 && record.range.abs_max == largest_finite(view.format);
  if (record.range.isfinite && !may_be_mask) [[likely]] {
    frame->add(record);
    return true;
  }
  frame->shapes.resize(record.shape_at);
  const std::optional<Content> content =
      can_be_remembered(x) ? std::optional<Content>(Content(x, epoch_)) : std::nullopt;
  // A copy to the host that nobody has waited for yet leaves in the output what was there before.
  if (!record.range.isfinite && table_ != nullptr && role == Role::output) table_->drain();
  if (!record_from_python(object, label, role, node, frame)) return false;
  if (content.has_value() && frame->records.back().python != nullptr)
    remember_mask(x, *content, frame->records.back().python);
  return true;
}

std::optional<bool> CallObserver::is_finite(PyObject* object, int64_t batch) {
  View view;
  if (!plain_view(object, &view) || !can_be_remembered(THPVariable_Unpack(object))) return std::nullopt;
  const at::Tensor x = THPVariable_Unpack(object);
  Node::Slot passing;
  HostReader reader{*this, x, view};
  reader.is_urgent = true;
  ++counters.tensors;
  return weight_range<RangeRow>(x, batch, false, &passing, reader).isfinite;
}

bool CallObserver::forget_weights(const at::Tensor& x) {
  if (!x.has_storage()) return false;
  WeightEntry* const entry = weight_cache_.find(key_of(x));
  if (entry != nullptr && x.grad().defined()) entry->entry.forget();
  return entry != nullptr;
}

// Adds the record of a tensor for which the budget has no room yet.
bool CallObserver::not_read_yet(Labels::Id label, Role role, OpenFrame* frame) {
  frame->add({label, role, NoteKind::not_checked, -1, 0, 0, kNotPending, {}, nullptr});
  return true;
}

// ---- masks ----------------------------------------------------------------------------------------------------------

// Adds the record of a tensor that is known to be a mask, and has not changed since.
bool CallObserver::known_mask(const at::Tensor& x, Labels::Id label, Role role, OpenFrame* frame) {
  if ((role != Role::input && role != Role::buffer) || !can_be_remembered(x)) return false;
  const Content content(x, epoch_);
  const auto found = masks_.find(content.key);
  if (found == masks_.end() || !found->second.tensor.entry.content.has_same_version(content) ||
      found->second.tensor.is_expired())
    return false;
  PyObject* const known = found->second.record.ptr();
  const std::string text = labels_.text(label);
  const bool is_same = to_utf8(PyTuple_GET_ITEM(known, record_item::label)) == text &&
                       to_utf8(PyTuple_GET_ITEM(known, record_item::role)) == role_name(role);
  py::object record = found->second.record;
  if (!is_same) {
    record = with_item(known, record_item::label, from_utf8(text));
    record = with_item(record.ptr(), record_item::role, from_utf8(role_name(role)));
  }
  ++counters.tensors;
  ++counters.cache_hits;
  frame->add({label, role, NoteKind::none, -1, 0, 0, kNotPending, {}, record.release().ptr()});
  return true;
}

// Remembers the record of a tensor that Python has found to be a mask.
void CallObserver::remember_mask(const at::Tensor& x, const Content& content, PyObject* record) {
  constexpr size_t kMost = 256;
  if (!is_record(record) || PyTuple_GET_ITEM(record, record_item::note) != helpers_.plain_mask.ptr()) return;
  if (masks_.size() >= kMost) masks_.clear();
  Mask& mask = masks_[content.key];
  mask.tensor.take(x, content, RangeRow{}, 0);
  mask.record = py::reinterpret_borrow<py::object>(record);
}

// ---- what the module owns -------------------------------------------------------------------------------------------

template <typename Action>
bool CallObserver::each_own(Node& node, PyObject* module, Role role, const Action& action) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
  const py::object named = attribute_of(module, role == Role::weight ? parameters : buffers);
  if (!named) return false;
  if (!PyDict_Check(named.ptr()) || PyDict_GET_SIZE(named.ptr()) == 0) return true;
  std::vector<Node::Slot>& slots = role == Role::weight ? node.weights : node.buffers;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  size_t count = 0;
  // Thread-local: while one tensor is read, another thread may observe its own call.
  static thread_local ObjectSet several;
  ObjectSet* const own = PyDict_GET_SIZE(named.ptr()) > 1 ? &several : nullptr;
  if (own != nullptr) own->clear();
  while (PyDict_Next(named.ptr(), &position, &name, &value)) {
    if (!is_tensor(value)) continue;
    if (role == Role::buffer) {
      const at::Tensor& x = THPVariable_Unpack(value);
      if (!x.is_floating_point() && !x.is_complex()) continue;
    }
    if (own != nullptr && !own->add(value)) continue;  // a tensor under two names counts once
    if (count == slots.size()) slots.emplace_back();
    Node::Slot& slot = slots[count++];
    if (slot.name.ptr() != name) {
      slot.name = py::reinterpret_borrow<py::object>(name);
      slot.label = labels_.of_text(to_utf8(name));
    }
    const py::object held = py::reinterpret_borrow<py::object>(value);
    if (!action(value, slot)) return false;
  }
  return true;
}

bool CallObserver::own_tensors(Node& node, PyObject* module, Role role, OpenFrame* frame) {
  const bool done = each_own(node, module, role, [&](PyObject* value, Node::Slot& slot) {
    // BatchNorm's kernels move the running statistics past the version counter.
    const bool moves = role == Role::buffer && is_training(module);
    return tensor(value, slot.label, role, node, moves ? Memory::moving : Memory::weight, &slot, frame);
  });
  return done || excuse(labels_.of_text(role_name(role)), role, frame);
}

void CallObserver::prepare(Node& node, PyObject* module) {
  for (const Role role : {Role::weight, Role::buffer}) {
    if (!options_.reads(role)) continue;
    const bool done = each_own(node, module, role, [&](PyObject* value, Node::Slot& slot) {
      View view;
      if (plain_view(value, &view)) find_entry(key_of(THPVariable_Unpack(value)), &slot);
      return true;
    });
    if (!done && !excuse_error()) throw py::error_already_set();
  }
}

void CallObserver::find_entry(uint64_t key, Node::Slot* slot) {
  if (slot->cached && slot->key == key) return;
  slot->cached = weight_cache_.entry(key);
  slot->key = key;
}

// ---- what goes in and out -------------------------------------------------------------------------------------------

struct CallObserver::Walk {
  CallObserver& self;
  const Node& node;
  OpenFrame* frame;
  const Role role;
  const Memory memory;
  int64_t leaves = 0;
  bool ended = false;  // by the limit
  int depth = 0;
  PyObject* inside[kMaxDepth];                  // not set beyond `depth`
  PyObject *args = nullptr, *kwargs = nullptr;  // of an output's call

  Walk(CallObserver& observer, const Node& its_node, OpenFrame* its_frame, Role its_role, Memory its_memory)
      : self(observer), node(its_node), frame(its_frame), role(its_role), memory(its_memory) {}

  // Returns whether an object was an argument, such as a key-value cache: what the call wrote into it, later ones meet.
  bool is_argument(PyObject* object) const {
    for (Py_ssize_t i = 0; args != nullptr && i < PyTuple_GET_SIZE(args); ++i)
      if (PyTuple_GET_ITEM(args, i) == object) return true;
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &item))
      if (item == object) return true;
    return false;
  }

  [[gnu::noinline]] bool note(Labels::Id label, NoteKind what) {
    ++leaves;
    frame->add({label, role, what, -1, 0, 0, kNotPending, {}, nullptr});
    return true;
  }

  // Python's own walk over a value: for limits, cycles and types that are not known here.
  [[gnu::noinline]] bool slowly(PyObject* value, Labels::Id label) {
    const OutsideCompiler outside;
    const py::object text = from_utf8(self.labels_.text(label));
    const py::object found = py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
        self.helpers_.leaves.ptr(), value, text.ptr(), role == Role::output ? Py_True : Py_False, nullptr));
    if (!found) return self.excuse(label, role, frame);
    if (!PyList_Check(found.ptr())) return true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found.ptr()); ++i) {
      PyObject* pair = PyList_GET_ITEM(found.ptr(), i);
      PyObject* leaf = PyTuple_GET_ITEM(pair, 1);
      const Labels::Id id = self.labels_.of_text(to_utf8(PyTuple_GET_ITEM(pair, 0)));
      ++leaves;
      const bool done = is_tensor(leaf) ? self.tensor(leaf, id, role, node, memory, nullptr, frame)
                                        : self.record_from_python(leaf, id, role, node, frame);
      if (!done) return false;
    }
    return true;
  }

  bool value(PyObject* object, Labels::Id label) {
    if (is_tensor(object)) {
      ++leaves;
      return self.tensor(object, label, role, node, memory, nullptr, frame);
    }
    return no_tensor(object, label);
  }

  [[gnu::noinline]] bool no_tensor(PyObject* object, Labels::Id label) {
    if (object == Py_None) return note(label, NoteKind::absent);
    if (is_scalar(object)) return note(label, NoteKind::not_a_tensor);
    if (PyTuple_Check(object) || PyList_Check(object)) return sequence(object, label);
    const std::optional<Kind> kind = PyDict_CheckExact(object) ? Kind::mapping : self.kind_of(Py_TYPE(object));
    if (!kind.has_value()) return false;
    // What an object is given as an argument shows in the module's output. Its own output may be in an object alone.
    if (kind == Kind::opaque && (role != Role::output || is_argument(object)))
      return note(label, NoteKind::not_a_tensor);
    if (kind == Kind::mapping && has_plain_keys(object)) return mapping(object, label);
    return slowly(object, label);
  }

  [[gnu::noinline]] bool sequence(PyObject* object, Labels::Id label) {
    const bool is_tuple = PyTuple_Check(object);
    const Py_ssize_t size = is_tuple ? PyTuple_GET_SIZE(object) : PyList_GET_SIZE(object);
    if (size > kMaxScalars) {
      bool only_scalars = true;
      for (Py_ssize_t i = 0; i < size && only_scalars; ++i)
        only_scalars = is_scalar(is_tuple ? PyTuple_GET_ITEM(object, i) : PyList_GET_ITEM(object, i));
      if (only_scalars) return note(label, NoteKind::not_a_tensor);
    }
    if (!enter(object, label)) return true;
    bool done = true;
    for (Py_ssize_t i = 0; done; ++i) {
      // A list may change while Python code reads one of its items: ask for its size each time, and hold the item.
      if (i >= (is_tuple ? PyTuple_GET_SIZE(object) : PyList_GET_SIZE(object))) break;
      if (limit(label) || i > kMaxLeaves) break;
      const py::object item =
          py::reinterpret_borrow<py::object>(is_tuple ? PyTuple_GET_ITEM(object, i) : PyList_GET_ITEM(object, i));
      done = value(item.ptr(), self.labels_.item(label, i));
    }
    --depth;
    return done;
  }

  [[gnu::noinline]] bool mapping(PyObject* object, Labels::Id label) {
    if (!enter(object, label)) return true;
    PyObject *key, *item;
    Py_ssize_t position = 0;
    bool done = true;
    while (done && PyDict_Next(object, &position, &key, &item)) {
      if (limit(label)) break;
      done = item_of(label, key, item);
    }
    --depth;
    return done;
  }

  // An item of a dictionary, which another thread may change meanwhile.
  bool item_of(Labels::Id parent, PyObject* key, PyObject* item) {
    const py::object held_key = py::reinterpret_borrow<py::object>(key);
    const py::object held_item = py::reinterpret_borrow<py::object>(item);
    const std::optional<Labels::Id> label = self.labels_.item(parent, key, [this](PyObject* k) { return spell(k); });
    return label.has_value() && value(item, *label);
  }

  std::optional<std::string> spell(PyObject* key) {
    const OutsideCompiler outside;
    const py::object text = py::reinterpret_steal<py::object>(PyObject_CallOneArg(self.helpers_.spell_key.ptr(), key));
    if (!text && !excuse_error()) return std::nullopt;
    return to_utf8(text.ptr());
  }

  static bool has_plain_keys(PyObject* object) {
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &item))
      if (!PyUnicode_CheckExact(key)) return false;
    return true;
  }

  // False, with a record that says why, where the walk goes no deeper.
  bool enter(PyObject* object, Labels::Id label) {
    if (std::find(inside, inside + depth, object) != inside + depth) return unwalked(label, "contains itself");
    if (depth >= kMaxDepth) return unwalked(label, "nested deeper than 32");
    inside[depth++] = object;
    return true;
  }

  // Adds the record of a part that is not entered; false.
  bool unwalked(Labels::Id label, const char* reason) {
    ++leaves;
    self.unread(label, role, reason, frame);
    return false;
  }

  // Returns whether the walk has reached its limit, and adds a record for that once.
  bool limit(Labels::Id label) {
    if (leaves < kMaxLeaves) return false;
    if (!ended) {
      ended = true;
      unwalked(label, "more than 4096 values");
    }
    return true;
  }
};

// Nothing, with an exception set, where asking was ended by what must end the call.
std::optional<CallObserver::Kind> CallObserver::kind_of(PyTypeObject* type) {
  const auto found = kinds_.find(type);
  if (found != kinds_.end()) return found->second;
  const OutsideCompiler outside;
  Kind kind = Kind::container;
  const py::handle handle(reinterpret_cast<PyObject*>(type));
  try {
    if (!helpers_.is_container(handle).cast<bool>()) {
      kind = Kind::opaque;
    } else if (PyType_IsSubtype(type, &PyDict_Type)) {
      // A dictionary with an order or an access of its own is asked through Python; a ModelOutput keeps both.
      for (const py::handle base : py::cast<py::tuple>(handle.attr("__mro__")))
        if (py::cast<std::string>(base.attr("__name__")) == "ModelOutput") kind = Kind::mapping;
    }
  } catch (py::error_already_set& error) {
    error.restore();
    if (!excuse_error()) return std::nullopt;  // else Python's walk says what it raises
  }
  if (kinds_.size() < 4096) {  // types made anew for every call would pile up
    Py_INCREF(handle.ptr());
    kinds_.emplace(type, kind);
  }
  return kind;
}

bool CallObserver::observe(Node& node, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output,
                           bool outermost, OpenFrame* frame) {
  return fill_frame(node, frame, [&] { return records(node, module, args, kwargs, output, outermost, frame); });
}

bool CallObserver::input_records(const Node& node, PyObject* args, PyObject* kwargs, OpenFrame* frame) {
  Walk walk(*this, node, frame, Role::input, Memory::activation);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i)
    if (!walk.value(PyTuple_GET_ITEM(args, i), labels_.item(Labels::kInput, i))) return false;
  if (kwargs == nullptr) return true;
  PyObject *key, *item;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &key, &item))
    if (!walk.item_of(Labels::kInput, key, item)) return false;
  return true;
}

bool CallObserver::records(Node& node, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output,
                           bool outermost, OpenFrame* frame) {
  if (options_.weights && !own_tensors(node, module, Role::weight, frame)) return false;
  if (options_.buffers && !own_tensors(node, module, Role::buffer, frame)) return false;
  if (options_.inputs && !input_records(node, args, kwargs, frame)) return false;
  if (options_.outputs) {
    // A write past the version counter between a module and the end of the forward would else hide a nan in what the
    // model returns.
    Walk walk(*this, node, frame, Role::output, outermost ? Memory::none : Memory::activation);
    walk.args = args;
    walk.kwargs = kwargs;
    if (!walk.value(output, Labels::kOutput)) return false;
    for (size_t i = 0; frame->added != nullptr && i < frame->added->size(); ++i)
      if (!walk.value((*frame->added)[i].tensor.ptr(), (*frame->added)[i].label)) return false;
  }
  return true;
}

}  // namespace nanwatch
