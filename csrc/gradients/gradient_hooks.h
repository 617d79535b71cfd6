// Hooks in the autograd graph. They hand gradients to the recorder on the engine's thread, without the interpreter
// lock. They hold neither tensors nor calls, and die with the graph. One on a leaf outlives the graphs that use it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
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

// At the node that made a tensor.
class TensorHook final : public GradientHook {
 public:
  TensorHook(std::weak_ptr<GradientRecorder> recorder, const void* node, uint32_t nr, GradientUser user)
      : recorder_(std::move(recorder)), node_(node), nr_(nr), users_{std::move(user)} {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const std::shared_ptr<GradientRecorder> recorder = recorder_.lock();
    if (recorder != nullptr && nr_ < gradients.size() && gradients[nr_].defined())
      guarded([&] { recorder->on_gradient(gradients[nr_], node_, nr_, users_); });
    return gradients;
  }

 private:
  std::weak_ptr<GradientRecorder> recorder_;
  const void* node_;  // only compared
  uint32_t nr_;       // of its results
  std::vector<GradientUser> users_;
};

// The one hook that PyTorch has at a leaf, for good: the engine iterates over a leaf's hooks without a lock, so none
// may be added or removed while another thread runs a backward. The calls that use the leaf are kept in here, by
// recorder.
class LeafHook final : public GradientHook {
 public:
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
        for (const Use& use : each.uses)
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
    std::erase_if(entry->uses, [](const Use& use) { return use.call.expired(); });
    entry->uses.push_back({user.call, user.part, user.label});
  }

  void release(const std::weak_ptr<GradientRecorder>& recorder) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(followed_,
                  [&](const Followed& each) { return is_same(each.recorder, recorder) || each.recorder.expired(); });
  }

 private:
  struct Use {
    std::weak_ptr<const GradientCall> call;
    Part part;
    Labels::Id label;
  };
  struct Followed {
    std::weak_ptr<GradientRecorder> recorder;
    std::vector<Use> uses;
  };

  static bool is_same(const std::weak_ptr<GradientRecorder>& a, const std::weak_ptr<GradientRecorder>& b) {
    return !a.owner_before(b) && !b.owner_before(a);
  }

  std::mutex mutex_;
  std::vector<Followed> followed_;
};

// The hook of a leaf, null where there is none. The first Python hook that is registered on a leaf removes all others.
inline LeafHook* find_hook(const at::Tensor& leaf) {
  for (const std::unique_ptr<torch::autograd::FunctionPreHook>& hook : torch::autograd::impl::hooks(leaf))
    if (auto* const leaf_hook = dynamic_cast<LeafHook*>(hook.get()); leaf_hook != nullptr) return leaf_hook;
  return nullptr;
}

inline LeafHook* find_or_add_hook(const at::Tensor& leaf) {
  if (LeafHook* const hook = find_hook(leaf)) return hook;
  // Not by add_hook, which allows for one.
  torch::autograd::impl::hooks(leaf).push_back(std::make_unique<LeafHook>());
  return find_hook(leaf);
}

}  // namespace nanwatch
