// Steps of optimizers, as CallRecorder sees them: what holds before one, and what one has written.
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

#include "gradients/gradient_hooks.h"
#include "recorder/call_recorder.h"

namespace py = pybind11;

namespace nanwatch {

bool CallRecorder::step_begins(py::handle groups) {
  constexpr int kNumFirst = 4;         // gradients: a nan on its way through the model leaves them nan
  constexpr int64_t kSmall = 1 << 12;  // elements of one
  static PyObject* const rate_name = PyUnicode_InternFromString("lr");
  static PyObject* const parameters_name = PyUnicode_InternFromString("params");
  if (box::BlackBox* const box = box::BlackBox::active()) box->step_begins();
  const bool is_broken = gradients_ != nullptr && gradients_->broken_backward() >= 0;
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!PyList_Check(groups.ptr()) || paused || latest_batch_ < 0 || is_broken || is_in_backward) return false;
  int num_read = 0;
  for (const py::handle group : py::reinterpret_borrow<py::list>(groups)) {
    if (!PyDict_Check(group.ptr())) return false;
    PyObject* const rate = PyDict_GetItemWithError(group.ptr(), rate_name);
    PyObject* const parameters = PyDict_GetItemWithError(group.ptr(), parameters_name);
    if (rate == nullptr || is_tensor(rate) || (PyFloat_Check(rate) && !std::isfinite(PyFloat_AS_DOUBLE(rate))) ||
        parameters == nullptr || !PyList_Check(parameters))
      return false;
    for (const py::handle x : py::reinterpret_borrow<py::list>(parameters)) {
      if (num_read == kNumFirst) break;
      if (!is_tensor(x.ptr())) return false;
      const at::Tensor gradient = THPVariable_Unpack(x.ptr()).grad();
      if (!gradient.defined() || gradient.numel() > kSmall) continue;
      if (!is_finite(gradient)) return false;
      ++num_read;
    }
  }
  forget_starts();
  return true;
}

bool CallRecorder::stepped(const py::list& groups) {
  using Stepped = CallObserver::Stepped;
  const bool reads = paused == 0 && !gathers_weights && next_batch_ % every_ == 0;
  bool has_nonfinite = false;
  for (const py::handle group : groups) {
    // A copy: other threads run while a weight is read.
    const py::tuple weights =
        PyList_Check(group.ptr()) ? py::tuple(py::reinterpret_borrow<py::list>(group)) : py::tuple();
    for (const py::handle x : weights) {
      if (!THPVariable_Check(x.ptr())) continue;
      const Stepped stepped = observer_.stepped(x.ptr(), reads, next_batch_);
      has_optimizer_ |= stepped != Stepped::unknown;
      has_nonfinite |= stepped == Stepped::nonfinite;
    }
  }
  if (!has_optimizer_) observer_.forget_weights();
  return has_nonfinite;
}

}  // namespace nanwatch
