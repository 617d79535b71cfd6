// nanwatch._C: what Python calls directly. `abs_range` is a raw METH_O function, because a pybind11 call costs more
// than the reduction of a small tensor does; everything off the hot path goes through pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <cstring>
#include <map>

#include "cpu/range_cpu.h"
#include "device/row_table.h"
#include "ops/tensor_view.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {

void bind_recorder(py::module_& m);  // bindings_recorder.cpp

namespace {

// Set by `bind`: the named tuple that is returned, and the same function in Python, for everything but a plain tensor.
struct Result {
  PyTypeObject* type = nullptr;
  PyObject* fallback = nullptr;
  PyObject* latest = nullptr;  // what was returned last
} range_result;

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
    const int64_t bytes = view.numel * int64_t(word_size(view.format));
    const RangeRow row =
        read_released(THPVariable_Unpack(object), view, bytes, [](const View& view) { return range_cpu(view); });
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

PyMethodDef abs_range_def = {"abs_range", abs_range, METH_O, nullptr};  // `bind` gives its docstring

#ifdef _OPENMP
const std::string openmp = std::to_string(_OPENMP);
#else
const std::string openmp = "none";
#endif

std::map<std::string, std::string> build_info() {
  return {{"torch", TORCH_VERSION}, {"compiler", __VERSION__}, {"openmp", openmp}};
}

// Lets abs_range return this named tuple, and describe itself as its fallback in Python does.
void bind_range(const py::type& type, const py::function& fallback) {
  auto* candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_IsSubtype(candidate, &PyTuple_Type)) throw py::type_error("bind: expected a named tuple type");
  Py_INCREF(candidate);
  Py_INCREF(fallback.ptr());
  // For good: Python binds once, at import.
  range_result = {candidate, fallback.ptr(), nullptr};
  const std::string text = py::str(py::module_::import("inspect").attr("getdoc")(fallback));
  abs_range_def.ml_doc = strdup(("abs_range(x, /)\n--\n\n" + text).c_str());
}

// In C++ no other thread comes in between: see _extension.instances_of.
py::list instances_of(const py::type& kind) {
  const py::object get_objects = py::module_::import("gc").attr("get_objects");
  py::list instances;
  for (const py::handle object : py::list(get_objects()))
    if (PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(kind.ptr())) != 0)
      instances.append(object);
  return instances;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of nanwatch.";
  m.add_object("abs_range", py::reinterpret_steal<py::object>(
                                PyCFunction_NewEx(&abs_range_def, nullptr, py::str("nanwatch").ptr())));
  m.def(
      "bind", &bind_range, py::arg("range_type"), py::arg("fallback"),
      "Sets what abs_range returns, and the function that serves what it does not and has the text that describes it.");
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
  m.def("cuda_compiled", [] { return cuda_backend() != nullptr; }, "Whether CUDA kernels are linked in.");
  bind_watched_call(m);
  bind_recorder(m);
  bind_call_slot(m);
}

}  // namespace nanwatch
