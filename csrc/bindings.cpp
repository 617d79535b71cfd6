// nanwatch._C: what Python calls directly. `abs_range` is a raw METH_O function, because a pybind11 call costs more
// than the reduction of a small tensor does; everything off the hot path goes through pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>

#include "call_recorder.h"
#include "plain_view.h"
#include "range_cpu.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

PyTypeObject* range_type = nullptr;  // nanwatch.AbsRange
PyObject* fallback = nullptr;        // the same through the dispatcher, for everything but a plain CPU tensor

// Reading without the interpreter lock pays once the read is longer than taking the lock again.
constexpr int64_t kReleaseLockBytes = 1 << 20;

PyObject* abs_range(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  View view;
  if (!plain_view(object, &view)) return PyObject_CallOneArg(fallback, object);
  RangeRow row;
  if (view.numel * int64_t(word_size(view.format)) >= kReleaseLockBytes) {
    // The tensor may lose its other owners meanwhile; the caller's reference keeps it, but not its storage if another
    // thread swaps that, so hold the storage.
    const c10::Storage storage = THPVariable_Unpack(object).storage();
    const py::gil_scoped_release release;
    row = range_cpu(view);
  } else {
    row = range_cpu(view);
  }
  PyObject* result = range_type->tp_alloc(range_type, 3);
  if (result == nullptr) return nullptr;
  PyTuple_SET_ITEM(result, 0, PyFloat_FromDouble(row.abs_min));
  PyTuple_SET_ITEM(result, 1, PyFloat_FromDouble(row.abs_max));
  PyTuple_SET_ITEM(result, 2, PyBool_FromLong(row.isfinite));
  return result;
  END_HANDLE_TH_ERRORS
}

PyMethodDef abs_range_def = {
    "abs_range", abs_range, METH_O,
    "abs_range(x, /)\n--\n\n"
    "The smallest and largest magnitude of a tensor and whether every element is finite, in one pass.\n\n"
    "Returns ``AbsRange(abs_min, abs_max, isfinite)``: Python floats and a bool, equal to ``x.abs().min()``,\n"
    "``x.abs().max()`` and ``torch.isfinite(x).all()``. A nan anywhere makes both ends nan; an empty tensor\n"
    "gives ``(inf, 0.0, True)``. Any shape, strides and device; every dtype that is read is listed in\n"
    "``docs/ranges.md``. Raises TypeError for what is not a tensor or cannot be read. Builds no graph."};

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

void bind(const py::type& type, const py::function& slow) {
  auto* candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_IsSubtype(candidate, &PyTuple_Type)) throw py::type_error("bind: expected a named tuple type");
  range_type = candidate;
  fallback = slow.ptr();
  Py_INCREF(range_type);
  Py_INCREF(fallback);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of nanwatch.";
  PyObject* function = PyCFunction_NewEx(&abs_range_def, nullptr, py::str("nanwatch").ptr());
  m.add_object("abs_range", py::reinterpret_steal<py::object>(function));
  m.def("bind", &bind, py::arg("range_type"), py::arg("fallback"),
        "Sets the type that abs_range returns and the function that serves what it does not.");
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
  m.def("cuda_compiled", &cuda_compiled, "Whether CUDA kernels are linked in.");
  bind_recorder(m);
}

}  // namespace nanwatch
