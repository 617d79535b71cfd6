// nanwatch._C: what Python calls directly. `abs_range` is a raw METH_O function, because a pybind11 call costs more
// than the reduction of a small tensor does; everything off the hot path goes through pybind11.
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "ops/plain_view.h"
#include "cpu/range_cpu.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Set by `bind`: the named tuples that are returned, and the same functions in Python, for everything but a plain
// tensor.
struct Result {
  PyTypeObject* type = nullptr;
  PyObject* fallback = nullptr;
  PyObject* latest = nullptr;  // of abs_range: what was returned last
};
Result range_result, health_result;

// Items of TensorHealth behind the columns up to num_subnormal.
constexpr int kNumelItem = column::num_subnormal + 1, kIndexItem = kNumelItem + 1, kHealthItems = kIndexItem + 1;

int64_t bytes_of(const View& view) {
  return view.numel * int64_t(word_size(view.format));
}

// A tuple of three, its items still to be set. The one that was returned last is used again once nobody else holds it,
// as zip() does with its own: to make and free one takes 30 ns, as long as all the rest of a small call.
PyObject* range_tuple() {
#if PY_VERSION_HEX < 0x030E0000  // later versions keep the tuple's hash, or have no lock that makes this safe
  PyObject* const latest = range_result.latest;
  if (latest != nullptr && Py_REFCNT(latest) == 1) {
    for (int i = 0; i < kRangeColumns; ++i) Py_DECREF(PyTuple_GET_ITEM(latest, i));
    return Py_NewRef(latest);
  }
  PyObject* result = range_result.type->tp_alloc(range_result.type, kRangeColumns);
  if (result != nullptr) Py_XSETREF(range_result.latest, Py_NewRef(result));
  return result;
#else
  return range_result.type->tp_alloc(range_result.type, kRangeColumns);
#endif
}

PyObject* abs_range(PyObject*, PyObject* object) {
  // Not HANDLE_TH_ERRORS: its buffer for warnings, of which there are none here, takes 10 ns.
  try {
    View view;
    if (!plain_view(object, &view)) return PyObject_CallOneArg(range_result.fallback, object);
    const RangeRow row = read_released(THPVariable_Unpack(object), view, bytes_of(view),
                                       [](const View& held) { return range_cpu(held); });
    PyObject* result = range_tuple();
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(result, column::abs_min, PyFloat_FromDouble(row.abs_min));
    PyTuple_SET_ITEM(result, column::abs_max, PyFloat_FromDouble(row.abs_max));
    PyTuple_SET_ITEM(result, column::isfinite, PyBool_FromLong(row.isfinite));
    return result;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* index_of(const View& view, int64_t position) {
  if (position < 0) Py_RETURN_NONE;
  PyObject* index = PyTuple_New(view.dims);
  if (index == nullptr) return nullptr;
  for (int64_t d = view.dims - 1; d >= 0; --d) {
    PyTuple_SET_ITEM(index, d, PyLong_FromLongLong(position % view.sizes[d]));
    position /= view.sizes[d];
  }
  return index;
}

PyObject* tensor_health(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  View view;
  // Signs are counted here: a tensor under the lazy negative bit is resolved by the dispatcher's kernel.
  if (!plain_view(object, &view) || THPVariable_Unpack(object).is_neg())
    return PyObject_CallOneArg(health_result.fallback, object);
  double row[kHealthColumns];
  read_released(THPVariable_Unpack(object), view, bytes_of(view), [&row](const View& held) { health_cpu(held, row); });
  PyObject* result = health_result.type->tp_alloc(health_result.type, kHealthItems);
  if (result == nullptr) return nullptr;
  // The row's columns in their order, and then two items that are no column.
  for (int at : {column::abs_min, column::abs_max, column::finite_abs_min, column::finite_abs_max})
    PyTuple_SET_ITEM(result, at, PyFloat_FromDouble(row[at]));
  PyTuple_SET_ITEM(result, column::isfinite, PyBool_FromLong(row[column::isfinite] != 0));
  for (int at = column::num_nan; at <= column::num_subnormal; ++at)
    PyTuple_SET_ITEM(result, at, PyLong_FromLongLong(int64_t(row[at])));
  PyTuple_SET_ITEM(result, kNumelItem, PyLong_FromLongLong(view.numel));
  PyTuple_SET_ITEM(result, kIndexItem, index_of(view, int64_t(row[column::first_nonfinite])));
  return result;
  END_HANDLE_TH_ERRORS
}

// `bind` gives both their docstrings.
PyMethodDef abs_range_def = {"abs_range", abs_range, METH_O, nullptr};
PyMethodDef tensor_health_def = {"tensor_health", tensor_health, METH_O, nullptr};

std::map<std::string, std::string> build_info() {
  std::map<std::string, std::string> info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
#ifdef _OPENMP
  info["openmp"] = std::to_string(_OPENMP);
#else
  info["openmp"] = "none";
#endif
  return info;
}

bool cuda_compiled() {
#ifdef NANWATCH_CUDA
  return true;
#else
  return false;
#endif
}

// Lets a function return this named tuple, and describe itself as its fallback in Python does.
void bind_result(Result* result, PyMethodDef* definition, const py::type& type, const py::function& fallback) {
  auto* candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_IsSubtype(candidate, &PyTuple_Type)) throw py::type_error("bind: expected a named tuple type");
  Py_INCREF(candidate);
  Py_INCREF(fallback.ptr());
  // For good: Python binds once, at import.
  *result = {candidate, fallback.ptr(), nullptr};
  const std::string text = py::str(py::module_::import("inspect").attr("getdoc")(fallback));
  definition->ml_doc = strdup((std::string(definition->ml_name) + "(x, /)\n--\n\n" + text).c_str());
}

// In C++ no other thread comes in between: see _extension.instances_of.
py::list instances_of(const py::type& kind) {
  const py::object get_objects = py::module_::import("gc").attr("get_objects");
  py::list found;
  for (const py::handle object : py::list(get_objects()))
    if (PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(kind.ptr())) != 0) found.append(object);
  return found;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of nanwatch.";
  for (PyMethodDef* definition : {&abs_range_def, &tensor_health_def})
    m.add_object(definition->ml_name,
                 py::reinterpret_steal<py::object>(PyCFunction_NewEx(definition, nullptr, py::str("nanwatch").ptr())));
  m.def(
      "bind",
      [](const py::type& range_type, const py::function& range_fallback, const py::type& health_type,
         const py::function& health_fallback) {
        bind_result(&range_result, &abs_range_def, range_type, range_fallback);
        bind_result(&health_result, &tensor_health_def, health_type, health_fallback);
      },
      py::arg("range_type"), py::arg("range_fallback"), py::arg("health_type"), py::arg("health_fallback"),
      "Sets what abs_range and tensor_health return, and the functions that serve what they do not and have the text "
      "that describes them.");
  m.def("cpu_capabilities", &cpu_capabilities, "Instruction sets this machine can run, widest last.");
  m.def("cpu_capability", &cpu_capability, "The instruction set in force.");
  m.def("cpu_capability_warning", &cpu_capability_warning, "Not empty if NANWATCH_CPU could not be honoured.");
  m.def(
      "set_cpu_capability",
      [](const std::string& name) {
        if (set_cpu_capability(name)) return;
        std::string accepted;
        for (const std::string& level : cpu_capabilities()) accepted += " " + level;
        throw py::value_error("set_cpu_capability: got '" + name + "'; accepted on this machine:" + accepted);
      },
      py::arg("name"), "Holds the reduction at an instruction set, for tests and measurements.");
  m.def("build_info", &build_info, "What the compiled part was built with.");
  m.def("instances_of", &instances_of, py::arg("kind"),
        "The objects of that class, or of one derived from it, that gc knows.");
  m.def("cuda_compiled", &cuda_compiled, "Whether CUDA kernels are linked in.");
  bind_watched_call(m);
  bind_recorder(m);
  bind_call_slot(m);
}

}  // namespace nanwatch
