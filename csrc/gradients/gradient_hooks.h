// Hooks in the autograd graph. They hand gradients to the recorder on the engine's thread, without the interpreter
// lock. They hold no tensors, and die with the graph. One on a leaf outlives the graphs that use it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "gradients/gradient_recorder.h"

namespace nanwatch {

class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  // Compiled autograd runs a graph of its own, of which nothing is seen. The default is an error that ends the
  // backward.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 protected:
  template <typename Action>
  static void guarded(const Action& action) {
    try {
      action();
    } catch (python_error&) {
      throw;  // Ctrl-C
    } catch (const std::exception& error) {
      TORCH_WARN_ONCE("nanwatch: a gradient could not be looked at: ", error.what());
    }
  }
};

// Part of a call.
struct GradientUse {
  std::weak_ptr<const GradientCall> call;
  Part part;
  Labels::Id label;
};

// At the node that made a tensor. That of an output alone keeps the call: an input would keep itself, as the start of
// its batch has it.
class TensorHook final : public GradientHook {
 public:
  TensorHook(std::weak_ptr<GradientRecorder> recorder, const void* node, uint32_t nr, const GradientUser& user)
      : recorder_(std::move(recorder)), node_(node), nr_(nr), use_{user.call, user.part, user.label} {
    if (user.part == Part::output) keep_ = user.call;
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const std::shared_ptr<GradientRecorder> recorder = recorder_.lock();
    const GradientUser user{use_.call.lock(), use_.part, use_.label};
    if (recorder != nullptr && user.call != nullptr && nr_ < gradients.size() && gradients[nr_].defined())
      guarded([&] { recorder->on_gradient(gradients[nr_], node_, nr_, {&user, 1}); });
    return gradients;
  }

 private:
  std::weak_ptr<GradientRecorder> recorder_;
  const void* node_;  // only compared
  uint32_t nr_;       // of its results
  GradientUse use_;
  std::shared_ptr<const GradientCall> keep_;
};

// The one hook that PyTorch has at a leaf, for good: the engine iterates over a leaf's hooks without a lock, so none
// may be added or removed while another thread runs a backward. The calls that use the leaf are kept in here, by
// recorder.
class LeafHook final : public GradientHook {
 public:
  explicit LeafHook(at::TensorImpl* leaf) : leaf_(leaf) {}
  LeafHook(const LeafHook&) = delete;
  LeafHook& operator=(const LeafHook&) = delete;

  // The leaf dies, or gets its first Python hook, with which PyTorch removes all others. The graphs of now then find
  // the calls at the node that accumulates the gradient.
  ~LeafHook() override {
    if (leaf_ == nullptr || c10::raw::intrusive_ptr::use_count(leaf_) == 0) return;
    const at::Tensor leaf(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(leaf_));
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf)) {
      auto hook = std::make_unique<LeafHook>(nullptr);
      hook->take(*this);
      accumulator->add_pre_hook(std::move(hook));
    }
  }

  // Takes the calls of another hook of the leaf.
  void take(LeafHook& hook) {
    const std::lock_guard<std::mutex> lock(hook.mutex_);
    followed_ = std::exchange(hook.followed_, {});
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (gradients.empty() || !gradients[0].defined()) return gradients;
    // Destroyed past the lock: a call that dies with this waits for the interpreter's.
    std::vector<std::pair<std::shared_ptr<GradientRecorder>, std::vector<GradientUser>>> followed;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const Followed& each : followed_) {
        std::shared_ptr<GradientRecorder> recorder = each.recorder.lock();
        if (recorder == nullptr) continue;
        auto& users = followed.emplace_back(std::move(recorder), std::vector<GradientUser>()).second;
        for (const GradientUse& use : each.uses)
          if (auto call = use.call.lock()) users.push_back({std::move(call), use.part, use.label});
      }
    }
    for (const auto& [recorder, alive] : followed)
      guarded([&, &recorder = recorder, &alive = alive] {
        const std::vector<GradientUser> users = recorder->users_now(alive);
        if (!users.empty()) recorder->on_gradient(gradients[0], this, 0, users);
      });
    return gradients;
  }

  void add(const std::weak_ptr<GradientRecorder>& recorder, const GradientUser& user) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_here = [&](const Followed& each) { return is_same(each.recorder, recorder); };
    auto entry = std::find_if(followed_.begin(), followed_.end(), is_here);
    if (entry == followed_.end()) entry = followed_.insert(entry, {recorder, {}});
    std::erase_if(entry->uses, [](const GradientUse& use) { return use.call.expired(); });
    entry->uses.push_back({user.call, user.part, user.label});
  }

  void release(const std::weak_ptr<GradientRecorder>& recorder) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(followed_,
                  [&](const Followed& each) { return is_same(each.recorder, recorder) || each.recorder.expired(); });
  }

 private:
  struct Followed {
    std::weak_ptr<GradientRecorder> recorder;
    std::vector<GradientUse> uses;
  };

  static bool is_same(const std::weak_ptr<GradientRecorder>& a, const std::weak_ptr<GradientRecorder>& b) {
    return !a.owner_before(b) && !b.owner_before(a);
  }

  at::TensorImpl* leaf_;  // owns this; null at an accumulator
  std::mutex mutex_;
  std::vector<Followed> followed_;
};

// Returns the LeafHook among these, null where there is none.
inline LeafHook* find_hook(const std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& hooks) {
  for (const std::unique_ptr<torch::autograd::FunctionPreHook>& hook : hooks)
    if (auto* const leaf_hook = dynamic_cast<LeafHook*>(hook.get()); leaf_hook != nullptr) return leaf_hook;
  return nullptr;
}

inline LeafHook* find_or_add_hook(const at::Tensor& leaf) {
  auto& hooks = torch::autograd::impl::hooks(leaf);
  if (LeafHook* const hook = find_hook(hooks)) return hook;
  auto hook = std::make_unique<LeafHook>(leaf.unsafeGetTensorImpl());
  if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf))
    if (LeafHook* const moved = find_hook(accumulator->pre_hooks())) hook->take(*moved);
  // Not by add_hook, which allows for one.
  hooks.push_back(std::move(hook));
  return find_hook(hooks);
}

// Returns whether a tensor in plain memory is finite; false where only a device or Python can tell.
inline bool is_finite(const at::Tensor& x) {
  View view{};
  return plain_view(x, &view) && range_cpu(view).isfinite;
}

// Returns the magnitude of the single number whose backward this thread runs, if it runs one: nan where it is not
// finite, or not in plain memory. Under the interpreter lock.
inline std::optional<double> loss_under_way() {
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame == nullptr) return std::nullopt;
  const auto code = pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  if (PyUnicode_CompareWithASCIIString(code.attr("co_name").ptr(), "_engine_run_backward") != 0) return std::nullopt;
  const pybind11::object roots = pybind11::handle(reinterpret_cast<PyObject*>(frame)).attr("f_locals")["t_outputs"];
  if (!PyTuple_Check(roots.ptr()) || PyTuple_GET_SIZE(roots.ptr()) != 1) return std::nullopt;
  PyObject* const root = PyTuple_GET_ITEM(roots.ptr(), 0);
  if (!THPVariable_Check(root) || THPVariable_Unpack(root).numel() != 1) return std::nullopt;
  View view{};
  const RangeRow range = plain_view(THPVariable_Unpack(root), &view) ? range_cpu(view) : RangeRow{};
  return range.isfinite ? range.abs_max : std::nan("");
}

}  // namespace nanwatch
