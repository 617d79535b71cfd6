// Hooks in the autograd graph. They hand gradients to the log on the engine's thread, without the interpreter lock.
// They hold neither tensors nor calls, and die with the graph. One on a leaf outlives the graphs that use it.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gradients/gradient_log.h"
#include "recorder/stopwatch.h"

namespace nanwatch {

class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  explicit GradientHook(const std::shared_ptr<GradientLog>& log) : log_(log) {}

  // Compiled autograd runs a graph of its own, of which nothing is seen. The default is an error that ends the
  // backward.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  bool is_of(const GradientLog* log) const { return log_.lock().get() == log; }
  bool is_alive() const { return !log_.expired(); }

 protected:
  template <typename Action>
  void with_log(const Action& action) {
    const std::shared_ptr<GradientLog> log = log_.lock();
    if (!log) return;
    const bool measures_time = log->subscriptions->has(kOwnTime);
    int64_t nanoseconds = 0;
    try {
      const Stopwatch stopwatch(measures_time, &nanoseconds);
      action(*log);
    } catch (python_error&) {
      throw;  // Ctrl-C
    } catch (const std::exception& error) {
      TORCH_WARN_ONCE("nanwatch: a gradient could not be looked at: ", error.what());
    }
    if (measures_time) log->spend(nanoseconds);
  }

 private:
  std::weak_ptr<GradientLog> log_;
};

// At the node that made a tensor.
class TensorHook final : public GradientHook {
 public:
  TensorHook(const std::shared_ptr<GradientLog>& log, const void* node, uint32_t nr, GradientUser user)
      : GradientHook(log), place_{node, nr, false}, users_{std::move(user)} {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (place_.nr < gradients.size() && gradients[place_.nr].defined())
      with_log([&](GradientLog& log) { log.on_gradient(gradients[place_.nr], place_, users_); });
    return gradients;
  }

 private:
  Place place_;
  std::vector<GradientUser> users_;
};

// At a leaf: one a log for all calls that use it, as it outlives their graphs.
class LeafHook final : public GradientHook {
 public:
  explicit LeafHook(const std::shared_ptr<GradientLog>& log) : GradientHook(log) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (!gradients.empty() && gradients[0].defined())
      with_log([&](GradientLog& log) {
        const std::vector<GradientUser> users = log.users_now(calls_, places_);
        if (!users.empty()) log.on_gradient(gradients[0], {this, 0, true}, users);
      });
    return gradients;
  }

  void add(const std::shared_ptr<const GradientCall>& call, Part part, Labels::Id label) {
    size_t kept = 0;
    for (size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].expired()) continue;
      if (kept != i) {
        calls_[kept] = std::move(calls_[i]);
        places_[kept] = places_[i];
      }
      ++kept;
    }
    calls_.resize(kept);
    places_.resize(kept);
    calls_.push_back(call);
    places_.emplace_back(part, label);
  }

 private:
  // A vector of its own: the log reads it under its lock.
  std::vector<std::weak_ptr<const GradientCall>> calls_;
  std::vector<std::pair<Part, Labels::Id>> places_;
};

// The one hook that PyTorch has at a leaf, for good: the engine iterates over a leaf's hooks without a lock, so none
// may be added or removed while another thread runs a backward. The hooks of the logs are kept in here.
class LeafHooks final : public torch::autograd::FunctionPreHook {
 public:
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    std::vector<std::shared_ptr<LeafHook>> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all = hooks_;
    }
    for (const std::shared_ptr<LeafHook>& hook : all) (*hook)(gradients);
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  // The hook of this log, made if there is none.
  std::shared_ptr<LeafHook> of(const std::shared_ptr<GradientLog>& log) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const std::shared_ptr<LeafHook>& hook : hooks_)
      if (hook->is_of(log.get())) return hook;
    hooks_.push_back(std::make_shared<LeafHook>(log));
    return hooks_.back();
  }

  void release(const GradientLog* log) {
    std::vector<std::shared_ptr<LeafHook>> released;  // destroyed past the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_other = [log](const std::shared_ptr<LeafHook>& hook) {
      return !hook->is_of(log) && hook->is_alive();
    };
    const auto first = std::stable_partition(hooks_.begin(), hooks_.end(), is_other);
    released.assign(std::make_move_iterator(first), std::make_move_iterator(hooks_.end()));
    hooks_.erase(first, hooks_.end());
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<LeafHook>> hooks_;
};

inline LeafHooks* find_hooks(const at::Tensor& leaf) {
  for (const std::unique_ptr<torch::autograd::FunctionPreHook>& hook : torch::autograd::impl::hooks(leaf))
    if (auto* own = dynamic_cast<LeafHooks*>(hook.get()); own != nullptr) return own;
  return nullptr;
}

// The first Python hook that is registered on a leaf removes all others, so this checks each time.
inline std::shared_ptr<LeafHook> leaf_hook(const at::Tensor& leaf, const std::shared_ptr<GradientLog>& log) {
  LeafHooks* own = find_hooks(leaf);
  if (own == nullptr) {
    auto made = std::make_unique<LeafHooks>();
    own = made.get();
    // Not by add_hook, which allows for one.
    torch::autograd::impl::hooks(leaf).push_back(std::move(made));
  }
  return own->of(log);
}

}  // namespace nanwatch
