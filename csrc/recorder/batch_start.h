// Start of a batch: its outermost call, and the state on which that call depends, so that a re-run can make it again.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include <cstdint>

#include "ops/tensor_view.h"
#include "blackbox/black_box.h"

namespace nanwatch {

inline at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// Used under the interpreter lock.
class BatchStart {
 public:
  BatchStart(int64_t batch, PyObject* module, PyObject* args, PyObject* kwargs, at::Tensor random,
             std::vector<at::Tensor> cuda, pybind11::object extra)
      : batch_(batch),
        module_(pybind11::reinterpret_borrow<pybind11::object>(module)),
        args_(pybind11::reinterpret_borrow<pybind11::object>(args)),
        kwargs_(pybind11::reinterpret_borrow<pybind11::object>(kwargs != nullptr ? kwargs : Py_None)),
        extra_(std::move(extra)),
        random_(std::move(random)),
        cuda_(std::move(cuda)) {
    for (size_t i = 0; i < kDevices.size(); ++i)
      autocast_[i] = {at::autocast::get_autocast_dtype(kDevices[i]), at::autocast::is_autocast_enabled(kDevices[i])};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) note(PyTuple_GET_ITEM(args, i), true);
    note_items(kwargs, true);
  }

  // Returns a pointer that any thread may drop, such as one of autograd's that frees a graph.
  static std::shared_ptr<BatchStart> shared(std::unique_ptr<BatchStart> start) {
    return std::shared_ptr<BatchStart>(start.release(), [](BatchStart* start) {
      if (Py_IsInitialized() == 0) return;
      const pybind11::gil_scoped_acquire lock;
      delete start;
    });
  }

  bool has_graph() const { return grad_; }

  // Ends the forward. Keeps the module weakly, as a model that keeps its output would else keep itself alive.
  void end() {
    weak_module_ = pybind11::reinterpret_steal<pybind11::object>(PyWeakref_NewRef(module_.ptr(), nullptr));
    if (!weak_module_) PyErr_Clear();
    module_ = pybind11::object();
  }

  // Drops the call.
  void release() {
    const auto released = std::make_tuple(std::move(args_), std::move(kwargs_), std::move(module_), std::move(extra_),
                                          std::move(versions_));
    weak_module_ = pybind11::object();
  }

  // A Start of python/nanwatch/recording/events.py.
  pybind11::object to_python(const pybind11::object& type) const {
    namespace py = pybind11;
    py::object module = module_ ? module_ : py::none();
    if (weak_module_) module = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(weak_module_.ptr()));
    py::list autocast;
    for (size_t i = 0; i < kDevices.size(); ++i)
      autocast.append(
          py::make_tuple(c10::DeviceTypeName(kDevices[i], true), py::cast(autocast_[i].first), autocast_[i].second));
    py::list versions;
    for (const auto& [tensor, version] : versions_) versions.append(py::make_tuple(tensor, version));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - began_;
    return type(batch_, module, args_ ? args_ : py::tuple(), kwargs_ ? kwargs_ : py::none(), py::cast(random_),
                py::tuple(py::cast(cuda_)), py::tuple(autocast), inference_, grad_, versions, elapsed.count(),
                extra_ ? extra_ : py::none());
  }

 private:
  static constexpr std::array<at::DeviceType, 2> kDevices = {at::DeviceType::CPU, at::DeviceType::CUDA};
  static constexpr Py_ssize_t kMostItems = 1024;  // of a container: longer ones are data

  // Notes the version of a tensor, which tells whether a second call would find it changed. Goes one level deep: a walk
  // to the end would cost more than all else here.
  void note(PyObject* value, bool enters) {
    if (is_tensor(value)) {
      const at::Tensor& x = THPVariable_Unpack(value);
      if (!x.is_inference())
        versions_.emplace_back(pybind11::reinterpret_borrow<pybind11::object>(value), uint32_t(x._version()));
    } else if (PyTuple_Check(value) || PyList_Check(value)) {
      for (Py_ssize_t i = 0; enters && i < std::min(Py_SIZE(value), kMostItems); ++i)
        note(PySequence_Fast_GET_ITEM(value, i), false);
    } else if (PyDict_Check(value)) {
      if (enters && PyDict_GET_SIZE(value) <= kMostItems) note_items(value, false);
    }
  }
  void note_items(PyObject* dict, bool enters) {
    each_item(dict, [&](PyObject*, PyObject* item) { return note(item, enters), true; });
  }

  int64_t batch_;
  pybind11::object module_, weak_module_, args_, kwargs_, extra_;
  std::vector<std::pair<pybind11::object, uint32_t>> versions_;
  at::Tensor random_;                                        // state of the CPU's generator
  std::vector<at::Tensor> cuda_;                             // states of the others, by device
  std::array<std::pair<at::ScalarType, bool>, 2> autocast_;  // by device: the dtype, whether it is on
  bool inference_ = c10::InferenceMode::is_enabled(), grad_ = c10::GradMode::is_enabled();
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// A recorded call, as its gradients refer to it.
struct CallOrigin {
  int64_t batch = 0, id = 0;
  int64_t caller = -1;               // the id of the call that made it
  int32_t node = 0, class_name = 0;  // the second is a label
  bool recomputed = false;
  std::shared_ptr<const BatchStart> start = {};  // lives as long as a gradient of the batch can still come
  uint32_t box = box::kUnnamed;                  // the number of the module in the black box
};

// State of the process that the start of a batch depends on. The recorder asks Python for its part of the start after a
// small buffer was written to or replaced, and while a name that somebody watches is true.
class StartSignals {
 public:
  void watch_name(pybind11::dict names, const std::string& name) {
    names_.emplace_back(std::move(names),
                        pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name.c_str())));
  }
  // Buffers as pairs of a weak reference to their module and a name.
  void watch_buffers(pybind11::list buffers) {
    buffers_ = std::move(buffers);
    note_buffers();
  }
  // Returns the state of the CPU's random numbers: the tensor of before while nobody draws, as a copy takes 1 µs.
  at::Tensor random_state() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    auto* const cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::mt19937_data_pod now = cpu->engine().data();
    const Normals normals{cpu->next_float_normal_sample(), cpu->next_double_normal_sample()};
    const bool is_same = now.seed_ == engine_.seed_ && now.left_ == engine_.left_ && now.next_ == engine_.next_ &&
                         now.seeded_ == engine_.seeded_ && now.state_ == engine_.state_ && normals == normals_;
    if (!is_same || !random_.defined()) random_ = generator.get_state();
    engine_ = now;
    normals_ = normals;
    return random_;
  }
  // Takes the names of torch.cuda, whose generators a start notes. There are none before CUDA is in use.
  void watch_generators(pybind11::dict cuda) { cuda_ = std::move(cuda); }
  std::vector<at::Tensor> generator_states() const {
    std::vector<at::Tensor> states;
    PyObject* const generators = cuda_ ? PyDict_GetItemString(cuda_.ptr(), "default_generators") : nullptr;
    for (Py_ssize_t i = 0; generators != nullptr && PyTuple_Check(generators) && i < PyTuple_GET_SIZE(generators); ++i)
      if (PyObject* const generator = PyTuple_GET_ITEM(generators, i); THPGenerator_Check(generator))
        states.push_back(state_of(reinterpret_cast<THPGenerator*>(generator)->cdata));
    return states;
  }
  void note_buffers() { noted_ = state_of_buffers(); }

  bool is_any_true() const {
    for (const auto& [names, name] : names_) {
      PyObject* const value = PyDict_GetItem(names.ptr(), name.ptr());
      if (value != nullptr && value != Py_False && value != Py_None && PyObject_IsTrue(value) == 1) return true;
    }
    return false;
  }
  bool has_buffer_changed() const { return state_of_buffers() != noted_; }

 private:
  // Returns a number that changes with the buffers and with their versions.
  uint64_t state_of_buffers() const {
    static PyObject* const attribute = PyUnicode_InternFromString("_buffers");
    const pybind11::list buffers = buffers_;  // the code of a module's class may give others
    uint64_t state = 0;
    for (const pybind11::handle pair : buffers) {
      PyObject* const module = PyWeakref_GetObject(PyTuple_GET_ITEM(pair.ptr(), 0));  // None once it is gone
      const auto named = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(module, attribute));
      if (!named) PyErr_Clear();
      PyObject* const value =
          named && PyDict_Check(named.ptr()) ? PyDict_GetItem(named.ptr(), PyTuple_GET_ITEM(pair.ptr(), 1)) : nullptr;
      at::TensorImpl* const x =
          value != nullptr && is_tensor(value) ? THPVariable_Unpack(value).unsafeGetTensorImpl() : nullptr;
      const uint32_t version = x == nullptr || x->is_inference() ? 0 : x->version_counter().current_version();
      state = ((state ^ reinterpret_cast<uintptr_t>(x)) * 0x9e3779b97f4a7c15ull) ^ version;
    }
    return state;
  }

  using Normals = std::pair<std::optional<float>, std::optional<double>>;  // drawn in pairs: the second is kept

  at::Tensor random_;
  at::mt19937_data_pod engine_ = {};  // of it
  Normals normals_;
  std::vector<std::pair<pybind11::dict, pybind11::object>> names_;
  pybind11::object cuda_;
  pybind11::list buffers_;
  uint64_t noted_ = 0;
};

}  // namespace nanwatch
