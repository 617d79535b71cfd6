// The part of CallObserver that walks over what a module owns, and over what goes into its call and comes out.
#include "recorder/call_observer.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// The limits of python/nanwatch/recording/walk.py; the tests hold the two walks against each other.
constexpr int64_t kMaxLeaves = 4096;
constexpr Py_ssize_t kMaxScalars = 64;

bool is_scalar(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value) ||
         PyBytes_Check(value);
}

}  // namespace

// The attributes of a module, as a rule from its `__dict__`: the way over `nn.Module.__getattr__` is five times as
// long.
class CallObserver::Attributes {
 public:
  explicit Attributes(PyObject* module)
      : module_(module), named_(py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr))) {}

  py::object get(PyObject* name) const {
    PyObject* const value =
        named_ && PyDict_Check(named_.ptr()) ? PyDict_GetItemWithError(named_.ptr(), name) : nullptr;
    if (value != nullptr) [[likely]]
      return py::reinterpret_borrow<py::object>(value);
    PyErr_Clear();
    return py::reinterpret_steal<py::object>(PyObject_GetAttr(module_, name));
  }

  bool is_training() const {
    static PyObject* const training = PyUnicode_InternFromString("training");
    const py::object flag = get(training);
    if (!flag) PyErr_Clear();
    return flag.ptr() != Py_False;
  }

 private:
  PyObject* module_;
  py::object named_;
};

// ---- what the module owns -------------------------------------------------------------------------------------------

template <typename Action>
bool CallObserver::each_own(Node& node, const Attributes& module, Role role, const Action& action) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
  const py::object named = module.get(role == Role::weight ? parameters : buffers);
  if (!named) return false;
  if (!PyDict_Check(named.ptr()) || PyDict_GET_SIZE(named.ptr()) == 0) return true;
  std::vector<Node::Slot>& slots = role == Role::weight ? node.weights : node.buffers;
  size_t count = 0;
  return each_item(named.ptr(), [&](PyObject* name, PyObject* value) {
    if (!is_tensor(value)) return true;
    if (role == Role::buffer) {
      const at::Tensor& x = THPVariable_Unpack(value);
      if (!x.is_floating_point() && !x.is_complex()) return true;
    }
    size_t place = 0;
    while (place < count && slots[place].value != value) ++place;
    if (place < count) return true;
    if (count == slots.size()) slots.emplace_back();
    Node::Slot& slot = slots[count++];
    slot.value = value;
    if (slot.name.ptr() != name) {
      slot.name = py::reinterpret_borrow<py::object>(name);
      slot.label = labels_.of_text(to_utf8(name));
    }
    const py::object keep = py::reinterpret_borrow<py::object>(value);
    return action(value, slot);
  });
}

bool CallObserver::own_tensors(Node& node, const Attributes& module, Role role, OpenFrame* frame) {
  const bool done = each_own(node, module, role, [&](PyObject* value, Node::Slot& slot) {
    // BatchNorm's kernels move the running statistics past the version counter.
    const bool moves = role == Role::buffer && module.is_training();
    return tensor(value, slot.label, role, node, moves ? Memory::moving : Memory::weight, &slot, frame);
  });
  return done || excuse(labels_.of_text(role_name(role)), role, frame);
}

void CallObserver::prepare(Node& node, PyObject* module) {
  for (const Role role : {Role::weight, Role::buffer}) {
    if (!options_.reads(role)) continue;
    const bool done = each_own(node, Attributes(module), role, [&](PyObject* value, Node::Slot& slot) {
      View view;
      if (plain_view(value, &view)) find_entry(Content::key_of(THPVariable_Unpack(value)), &slot);
      return true;
    });
    if (!done && !excuse_error()) throw py::error_already_set();
  }
}

// ---- what goes in and out -------------------------------------------------------------------------------------------

struct CallObserver::Walk {
  CallObserver& self;
  const Node& node;
  OpenFrame* frame;
  const Role role;
  const Memory memory;
  const ModuleCall& call;
  int64_t leaves = 0;
  bool ended = false;  // by the limit
  int depth = 0;

  // Returns whether an object was an argument, such as a key-value cache: later calls see what this one wrote into it.
  bool is_argument(PyObject* object) const {
    PyObject** const args = &PyTuple_GET_ITEM(call.args, 0);
    return std::count(args, args + PyTuple_GET_SIZE(call.args), object) > 0 ||
           !each_item(call.kwargs, [&](PyObject*, PyObject* item) { return item != object; });
  }

  [[gnu::noinline]] bool value(PyObject* object, Labels::Id label) {
    if (!is_tensor(object)) return no_tensor(object, label);
    ++leaves;
    return self.tensor(object, label, role, node, memory, nullptr, frame);
  }

  [[gnu::noinline]] bool no_tensor(PyObject* object, Labels::Id label) {
    if (object == Py_None) return note(label, NoteKind::absent);
    if (is_scalar(object)) return note(label, NoteKind::not_a_tensor);
    if (PyTuple_Check(object) || PyList_Check(object)) return sequence(object, label);
    const std::optional<Kind> kind = PyDict_CheckExact(object) ? Kind::mapping : self.kind_of(Py_TYPE(object));
    if (!kind.has_value()) return false;
    // The output of the module shows what was in an argument. An object that is returned may be all that there is.
    if (kind == Kind::opaque && (role != Role::output || is_argument(object)))
      return note(label, NoteKind::not_a_tensor);
    if (kind == Kind::mapping && has_plain_keys(object)) return mapping(object, label);
    return walk_in_python(object, label);
  }

  bool note(Labels::Id label, NoteKind kind) {
    ++leaves;
    frame->add({label, role, kind});
    return true;
  }

  [[gnu::noinline]] bool sequence(PyObject* object, Labels::Id label) {
    // A list may change while Python code reads one of its items.
    const auto size = [object] { return PySequence_Fast_GET_SIZE(object); };
    bool only_scalars = size() > kMaxScalars;
    for (Py_ssize_t i = 0; only_scalars && i < size(); ++i)
      only_scalars = is_scalar(PySequence_Fast_GET_ITEM(object, i));
    if (only_scalars) return note(label, NoteKind::not_a_tensor);
    if (!enter(object, label)) return true;
    bool done = true;
    for (Py_ssize_t i = 0; done && i < size() && i <= kMaxLeaves && !limit(label); ++i) {
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i));
      done = value(item.ptr(), self.labels_.item(label, i));
    }
    --depth;
    return done;
  }

  [[gnu::noinline]] bool mapping(PyObject* object, Labels::Id label) {
    if (!enter(object, label)) return true;
    bool done = true;
    each_item(object,
              [&](PyObject* key, PyObject* item) { return !limit(label) && (done = item_of(label, key, item)); });
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
    return each_item(object, [](PyObject* key, PyObject*) { return PyUnicode_CheckExact(key) != 0; });
  }

  // Walks over a value of a type that is not known here, by the walk in Python.
  [[gnu::noinline]] bool walk_in_python(PyObject* object, Labels::Id label) {
    const OutsideCompiler outside;
    const py::object text = from_utf8(self.labels_.text(label));
    py::list given(py::reinterpret_borrow<py::object>(call.args));
    if (call.kwargs != nullptr) given += py::reinterpret_borrow<py::dict>(call.kwargs).attr("values")();
    py::tuple around(depth);
    for (int i = 0; i < depth; ++i) around[size_t(i)] = reinterpret_cast<uintptr_t>(frame->inside[i]);
    const py::object pairs = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(self.helpers_.leaves.ptr(), "OOOOOL", object, text.ptr(),
                              role == Role::output ? Py_True : Py_False, given.ptr(), around.ptr(), leaves));
    if (!pairs) return self.excuse(label, role, frame);
    bool done = PyList_Check(pairs.ptr());
    for (Py_ssize_t i = 0; done && i < PyList_GET_SIZE(pairs.ptr()); ++i) {
      PyObject* const pair = PyList_GET_ITEM(pairs.ptr(), i);
      PyObject* const leaf = PyTuple_GET_ITEM(pair, 1);
      const Labels::Id id = self.labels_.of_text(to_utf8(PyTuple_GET_ITEM(pair, 0)));
      ++leaves;
      done = is_tensor(leaf) ? self.tensor(leaf, id, role, node, memory, nullptr, frame)
                             : self.record_from_python(leaf, id, role, node, frame);
    }
    ended |= leaves > kMaxLeaves;
    return done || !PyList_Check(pairs.ptr());
  }

  // False, with a record that says why, where the walk goes no deeper.
  bool enter(PyObject* object, Labels::Id label) {
    PyObject** const inside = frame->inside;
    if (std::find(inside, inside + depth, object) != inside + depth) return unwalked(label, "contains itself");
    if (depth >= OpenFrame::kMaxDepth) return unwalked(label, "nested deeper than 32");
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
    if (!std::exchange(ended, true)) unwalked(label, "more than 4096 values");
    return true;
  }
};

// Returns nothing, with an exception set, if Python code has raised one that must end the call.
std::optional<CallObserver::Kind> CallObserver::kind_of(PyTypeObject* type) {
  const auto entry = kinds_.find(type);
  if (entry != kinds_.end()) return entry->second;
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

bool CallObserver::records(Node& node, const ModuleCall& call, OpenFrame* frame) {
  if (options_.weights || options_.buffers) {
    const Attributes module(call.module);
    if (options_.weights && !own_tensors(node, module, Role::weight, frame)) return false;
    if (options_.buffers && !own_tensors(node, module, Role::buffer, frame)) return false;
  }
  if (options_.inputs) {
    Walk walk{*this, node, frame, Role::input, Memory::activation, call};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call.args); ++i)
      if (!walk.value(PyTuple_GET_ITEM(call.args, i), labels_.item(Labels::kInput, i))) return false;
    const auto walk_item = [&](PyObject* key, PyObject* item) { return walk.item_of(Labels::kInput, key, item); };
    if (!each_item(call.kwargs, walk_item)) return false;
  }
  if (options_.outputs) {
    // A write past the version counter between a module and the end of the forward would else hide a nan in what the
    // model returns.
    const Memory memory = call.is_outermost ? Memory::none : Memory::activation;
    Walk walk{*this, node, frame, Role::output, memory, call};
    if (!walk.value(call.output, Labels::kOutput)) return false;
    for (const AddedOutput& added : frame->added)
      if (!walk.value(added.tensor.ptr(), added.label)) return false;
  }
  return true;
}

}  // namespace nanwatch
