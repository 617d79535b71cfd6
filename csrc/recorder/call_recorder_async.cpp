// The part of CallRecorder for batches whose rows are on a device. It puts their frames aside, and reports them when
// the rows have completed. The callbacks are those of the host, in the same order: each frame is reported after it was
// put into the ring and before the next one is, so that a report ends at the first non-finite frame.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "recorder/call_recorder.h"
#include "recorder/python_error.h"

namespace py = pybind11;

namespace nanwatch {

// Returns whether frames of this thread wait, of this batch or of one before it: then the next one waits behind them.
bool CallRecorder::has_pending(const Thread& thread) const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const std::unique_ptr<PendingBatch>& batch) { return batch->thread == &thread; });
}

// Puts the thread's frame behind those of its batch that wait already.
void CallRecorder::defer(Thread& thread, int32_t caller) {
  if (thread.pending == nullptr) {
    pending_.push_back(
        std::make_unique<PendingBatch>(PendingBatch{&thread, thread.batch, thread.recomputed, thread.recomputed}));
    thread.pending = pending_.back().get();
  }
  thread.pending->entries.emplace_back();
  CallFrame& entry = thread.pending->entries.back();
  if (box_.box() != nullptr)
    box_.add(thread.frame, nodes_[size_t(thread.frame.node)]->box, observer_.labels(), nullptr);
  entry.frame.swap(thread.frame);
  entry.caller = caller;
}

// The thread's batch gets no more frames. `waits`: whether it is to be waited for. False with an exception set for what
// must end the call.
bool CallRecorder::close(Thread& thread, bool completed, bool* waits) {
  PendingBatch& batch = *std::exchange(thread.pending, nullptr);
  batch.given.batch = batch.number;
  const bool done =
      survived([&] { return observer_.observe_given(given_to(thread).ptr(), thread.kwargs, &batch.given); });
  const HeldError raised;
  batch.end(*RowTable::instance(), completed);
  // Compiled code runs without grad mode, whatever comes of its results.
  batch.has_graph = bool(thread.given) || at::GradMode::is_enabled();
  // Nobody acts on a non-finite recomputation before its backward has ended: no reason to stop the device in between.
  *waits = !batch.recomputed && (check_ != Check::async || is_traced(batch.number));
  return done;
}

// Reports the batches of this thread, or of all, that have ended and whose rows have completed, and the replays, whose
// numbers are known only now. With `wait`, it reports all that have ended. Returns false with an exception set if a
// callback raised.
bool CallRecorder::poll_thread(Thread& thread, bool wait, bool all) {
  return poll_batches(thread, wait, all) && (graphs_.empty() || poll_replays(wait));
}

// Returns the first batch that may be reported. Of other threads, unless `all` is set, those are the recomputations and
// backwards behind none of their own forwards: autograd may run them on a thread that never polls.
CallRecorder::Pending::iterator CallRecorder::find_ended(const Thread& thread, bool all) {
  std::vector<const void*> behind_forwards;
  return std::find_if(pending_.begin(), pending_.end(), [&](const std::unique_ptr<PendingBatch>& batch) {
    const bool is_own = all || batch->thread == &thread;
    if (is_own) return batch->ended;
    const bool is_behind =
        std::find(behind_forwards.begin(), behind_forwards.end(), batch->thread) != behind_forwards.end();
    if (batch->ended && !is_behind && (batch->recomputed || batch->backward != nullptr)) return true;
    behind_forwards.push_back(batch->thread);
    return false;
  });
}

bool CallRecorder::poll_batches(Thread& thread, bool wait, bool all) {
  const RowTable& table = *RowTable::instance();
  while (true) {
    const auto found = find_ended(thread, all);
    if (found == pending_.end()) return true;
    std::shared_ptr<const PendingEvents> awaited = (*found)->awaited;
    if (!wait && !table.poll(awaited->rows, awaited->events)) return true;
    // While the device was asked, another thread may have taken it.
    const auto still = std::find_if(pending_.begin(), pending_.end(), [&](const std::unique_ptr<PendingBatch>& batch) {
      return batch->awaited == awaited;
    });
    if (still == pending_.end()) continue;
    const std::unique_ptr<PendingBatch> batch = std::move(*still);
    pending_.erase(still);
    if (wait) table.wait(awaited->rows, awaited->events);
    if (!table.poll(awaited->rows, awaited->events))
      for (const PendingRowPtr& row : awaited->rows) row->fail(0);  // the stream is being captured: no telling when
    awaited = batch->awaited = nullptr;
    if (!survived([&] { return report(*batch); })) return false;
  }
}

// The thread's batch was captured into a graph, if its forward came to its end. False with an exception set for what
// must end the call.
bool CallRecorder::captured(Thread& thread, bool completed) {
  const auto batch = std::make_shared<CapturedBatch>();
  batch->graph = std::move(thread.graph);
  batch->entries = std::exchange(thread.captured, {});
  if (!completed || batch->graph->rows.empty()) return true;
  batch->given.pending.graph_of_batch = &batch->graph;
  const bool done =
      survived([&] { return observer_.observe_given(given_to(thread).ptr(), thread.kwargs, &batch->given); });
  batch->given.pending.graph_of_batch = nullptr;
  if (!done) return false;
  if (RowTable::instance()->end_graph(*batch->graph) == 0) {
    graphs_.push_back(batch);
  } else if (!notify("on_warning",
                     py::make_tuple("nanwatch: this batch was not captured into one CUDA graph as a whole: its "
                                    "replays are not seen"))) {
    PyErr_WriteUnraisable(nullptr);
  }
  return true;
}

// Reports the replays that have ended since the last poll, each a batch of its own.
bool CallRecorder::poll_replays(bool wait) {
  for (size_t i = 0; i < graphs_.size(); ++i) {
    const std::shared_ptr<CapturedBatch> captured = graphs_[i];  // while it is reported, others may be captured
    if (wait) RowTable::instance()->record_event(captured->graph->device).wait();
    const uint64_t replays = captured->graph->replays();
    if (paused) {
      captured->seen = replays;
      continue;
    }
    if (replays > captured->seen + GraphRows::kReplays) {
      const uint64_t lost = replays - GraphRows::kReplays - captured->seen;
      captured->seen += lost;
      next_batch_ += int64_t(lost);
      if (!notify("on_warning",
                  py::make_tuple("nanwatch: " + std::to_string(lost) +
                                 " replays of a CUDA graph were not seen, as each look finds the latest " +
                                 std::to_string(GraphRows::kReplays) + "; call Watch.look() at least as often")))
        return false;
    }
    while (captured->seen < replays) {
      const uint64_t replay = ++captured->seen;
      latest_batch_ = next_batch_++;
      if (latest_batch_ % every_ != 0) continue;
      PendingBatch batch{nullptr, latest_batch_, false, true, true, true};
      for (const CallFrame& entry : captured->entries) {
        batch.entries.emplace_back();
        batch.entries.back().frame.copy(entry.frame);
        batch.entries.back().frame.batch = latest_batch_;
        batch.entries.back().caller = entry.caller;
        captured->fill(&batch.entries.back().frame, replay);
      }
      batch.given.copy(captured->given);
      captured->fill(&batch.given, replay);
      if (!survived([&] { return report(batch); })) return false;
    }
  }
  return true;
}

// Reports the frames of a batch as if they were recorded now. Returns false with an exception set if a callback raised.
bool CallRecorder::report(PendingBatch& batch) {
  if (batch.backward != nullptr) return batch.backward->report(batch.left);
  std::optional<HeldError> first;  // of what was raised
  const auto check = [&first](bool done) {
    if (done) return;
    if (first) {
      PyErr_Clear();
    } else {
      first.emplace();
    }
  };
  bool has_nonfinite = false;
  const Node nobody;
  check(observer_.resolve(nobody, &batch.given));
  for (CallFrame& entry : batch.entries) {
    FrameData& frame = entry.frame;
    check(observer_.resolve(*nodes_[size_t(frame.node)], &frame));
    const bool is_nonfinite = frame.has_nonfinite;
    has_nonfinite |= is_nonfinite;
    keep(frame, &batch.least);
    if (first || (!is_nonfinite && !reports_frames(batch.number))) continue;
    FrameData copy;
    copy.copy(ring_.latest());
    const py::object seen = to_python(copy);
    if (reports_frames(batch.number)) check(notify("on_frame", py::make_tuple(seen)));
    if (is_nonfinite && !first)
      check(notify("on_pending_nonfinite",
                   py::make_tuple(seen, name_of(entry.caller), to_python(batch.given), batch.is_left)));
  }
  if (box_.box() != nullptr && batch.least.begun != 0)
    box_.box()->end_batch(batch.least, batch.number, !batch.completed);
  if (batch.is_left && (has_nonfinite || (subscriptions->has(kBatchEnd) && !batch.recomputed)))
    check(
        notify("on_pending_batch_end", py::make_tuple(batch.number, !first && (batch.completed || batch.recomputed))));
  return !first;
}

bool CallRecorder::report_backward(const void* thread, int64_t batch_number, std::vector<PendingRowPtr> rows,
                                   std::unique_ptr<EndedBackward> backward) {
  const bool has_to_wait = !rows.empty() || std::any_of(pending_.begin(), pending_.end(), [thread](const auto& batch) {
    return batch->thread == thread;
  });
  if (!has_to_wait) return backward->report(py::none());
  py::object left;
  if (!notify("on_backward_pending", py::make_tuple(), &left)) return false;
  auto batch = std::make_unique<PendingBatch>(PendingBatch{thread, batch_number, false, true, true, true, true});
  batch->await_rows(*RowTable::instance(), std::move(rows));
  batch->backward = std::move(backward);
  batch->left = std::move(left);
  pending_.push_back(std::move(batch));
  if (!awaits_backwards) return true;
  Thread& own = this_thread();
  if (own.recording) return true;
  const Recording recording(&own);
  return poll_batches(own, true, true);
}

// Returns false with an exception set: the call's own if it has one, unless a callback raised another from it.
bool CallRecorder::end_batch(Thread& thread, bool completed) {
  HeldError own;                                                  // the call's
  const std::shared_ptr<PyObject> held = std::move(thread.held);  // until the callback has returned
  PendingBatch* const pending = thread.pending;
  if (box::BlackBox* const box = box_.box(); box != nullptr && !thread.recomputed) {
    if (pending == nullptr) {
      box->end_batch(thread.least, thread.batch, !completed);
    } else {
      pending->least = thread.least;
      pending->least.ended = box::ticks();
    }
  }
  bool done = true, waits = false;
  const Recording recording(&thread);  // the callback may run the model once more
  if (thread.graph != nullptr) {
    done = captured(thread, completed);
  } else if (pending != nullptr) {
    done = close(thread, completed, &waits);
  }
  thread.args = thread.kwargs = nullptr;
  observer_.end_batch();
  // Every batch that ends by an exception is reported. The callback may change the subscriptions.
  const auto tells_end = [&] { return !thread.recomputed && (subscriptions->has(kBatchEnd) || !completed); };
  if (done && pending_.empty() && !tells_end()) return completed;
  done = done && (pending_.empty() || poll_thread(thread, waits, false));
  HeldError raised;
  const bool is_pending = std::any_of(pending_.begin(), pending_.end(),
                                      [&](const std::unique_ptr<PendingBatch>& one) { return one.get() == pending; });
  if (is_pending) pending->is_left = true;
  if (tells_end()) {
    const HeldError::Shown shown(completed ? &raised : &own);
    const char* const method = is_pending ? "on_batch_pending" : "on_batch_end";
    const bool fine = completed && done;
    done &= survived([&] { return notify(method, py::make_tuple(thread.batch, fine)); });
  }
  return completed && done;
}

void CallRecorder::poll(bool wait) {
  if (!abandon_of_ended_threads() || !finish_broken_backwards()) throw py::error_already_set();
  if (pending_.empty() && graphs_.empty()) return;
  Thread& thread = this_thread();
  if (thread.recording) return;
  const Recording recording(&thread);
  if (!poll_thread(thread, wait, true)) throw py::error_already_set();
}

bool CallRecorder::may_be_pending() const {
  return !pending_.empty() || !graphs_.empty();
}

// Up to the newest forward or backward that a step may take, newest first: behind its events there is nothing left to
// wait for of those before it that ran on the same streams. A recomputation by itself is not waited for: the first
// layers' comes at the end of the backward. It says that a batch without a graph may have been checkpointed as a whole.
void CallRecorder::await_before_step() {
  Thread& thread = this_thread();
  if (thread.recording || pending_.empty()) return;
  const bool recomputes = std::any_of(pending_.begin(), pending_.end(),
                                      [](const std::unique_ptr<PendingBatch>& batch) { return batch->recomputed; });
  std::vector<std::shared_ptr<const PendingEvents>> taken;  // while this waits, others may report the batches
  for (auto one = pending_.rbegin(); one != pending_.rend(); ++one) {
    const PendingBatch& batch = **one;
    const bool is_taken = !batch.recomputed && (batch.has_graph || recomputes);
    if (batch.ended && (is_taken || !taken.empty())) taken.push_back(batch.awaited);
  }
  const RowTable& table = *RowTable::instance();
  for (const auto& awaited : taken) {
    if (table.poll(awaited->rows, awaited->events) || table.is_capturing(awaited->events)) continue;
    table.wait(awaited->rows, awaited->events);
  }
  poll(false);
}

// The frames whose rows have come, of those that wait.
py::list CallRecorder::unconfirmed_calls() const {
  std::vector<std::pair<int64_t, int32_t>> calls;  // copied first, as below
  for (const std::unique_ptr<PendingBatch>& batch : pending_)
    for (const CallFrame& entry : batch->entries) {
      const std::vector<PendingRowPtr>& rows = entry.frame.pending.rows;
      if (!std::all_of(rows.begin(), rows.end(), [](const PendingRowPtr& row) { return row->poll(); }))
        calls.emplace_back(entry.frame.batch, entry.frame.node);
    }
  py::list found;
  for (const auto& [batch, node] : calls)
    found.append(py::make_tuple(batch, nodes_[size_t(node)]->name, nodes_[size_t(node)]->class_name));
  return found;
}

py::list CallRecorder::pending_frames() {
  // Copied first: making Python objects may let another thread report the batches.
  std::vector<FrameData> copies;
  const auto copy = [&copies](const PendingBatch& batch) {
    if (batch.backward != nullptr) return false;
    for (const CallFrame& entry : batch.entries) {
      const std::vector<PendingRowPtr>& rows = entry.frame.pending.rows;
      if (!std::all_of(rows.begin(), rows.end(), [](const PendingRowPtr& row) { return row->poll(); })) return false;
      copies.emplace_back().copy(entry.frame);
    }
    return true;
  };
  for (const std::unique_ptr<PendingBatch>& batch : pending_)
    if (!copy(*batch)) break;
  py::list found;
  for (FrameData& frame : copies) {
    if (!observer_.resolve(*nodes_[size_t(frame.node)], &frame)) throw py::error_already_set();
    found.append(to_python(frame));
  }
  return found;
}

}  // namespace nanwatch
