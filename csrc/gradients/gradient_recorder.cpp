#include "gradients/gradient_recorder.h"

#include <ATen/TracerMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "blackbox/black_box.h"
#include "gradients/gradient_hooks.h"

namespace py = pybind11;
namespace autograd = torch::autograd;

namespace nanwatch {
namespace {

// Reports the end of a backward: the engine calls it, or drops it with all else when an exception ends the run.
class End {
 public:
  End(std::weak_ptr<GradientRecorder> recorder, int64_t task) : recorder_(std::move(recorder)), task_(task) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() { over(false); }

  void over(bool completed) const {
    if (const auto recorder = recorder_.lock()) recorder->over(task_, completed);
  }

 private:
  std::weak_ptr<GradientRecorder> recorder_;
  int64_t task_;
};

// A pointer to a node of the graph. Its kind is another one from version to version of torch.
using NodePointer = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

// A tensor of a call, and the node that made it; none for a leaf.
struct Followed {
  const GradientCandidate* candidate;
  NodePointer node;
  Part part;

  bool is_same(const Followed& other) const {
    if (candidate->tensor.unsafeGetTensorImpl() == other.candidate->tensor.unsafeGetTensorImpl()) return true;
    return node && node == other.node && candidate->tensor.output_nr() == other.candidate->tensor.output_nr();
  }
};

// Returns the tensors on which hooks would ever see a gradient of numbers.
std::vector<Followed> with_gradient(const std::vector<GradientCandidate>& candidates, bool only_outputs) {
  static const c10::DispatchKeySet unreal(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  std::vector<Followed> followed;
  for (const GradientCandidate& candidate : candidates) {
    const at::Tensor& x = candidate.tensor;
    if (candidate.role == Role::buffer || (only_outputs && candidate.role != Role::output) || !x.requires_grad() ||
        x.is_meta() || !(x.key_set() & unreal).empty())
      continue;
    const Part part = candidate.role == Role::output  ? Part::output
                      : candidate.role == Role::input ? Part::input
                                                      : Part::weight;
    try {
      followed.push_back({&candidate, x.grad_fn(), part});
    } catch (const c10::Error&) {
      // One of several views, as unbind gives them, after their base was written into: it has no graph any more, and
      // autograd refuses each use of it.
    }
  }
  return followed;
}

// The calls of a backward, ordered by when each was done: when it and all calls made in it had their last gradient. So
// a parent comes after its children, as in the forward.
std::vector<const GradientCall*> calls_of(const Backward& backward) {
  std::unordered_map<const GradientCall*, size_t> done;
  std::vector<const GradientCall*> calls;
  for (size_t i = 0; i < backward.events.size(); ++i) {
    const GradientCall* const call = backward.events[i].user.call.get();
    if (!done.insert_or_assign(call, i).second) continue;
    calls.push_back(call);
  }
  const auto by_number = [](const GradientCall* a, const GradientCall* b) { return a->number < b->number; };
  std::sort(calls.begin(), calls.end(), by_number);
  std::unordered_map<int64_t, size_t> of_children;  // by the call that made them, until it is met
  for (const GradientCall* call : calls) {
    size_t& end = done[call];
    if (const auto children = of_children.find(call->id); children != of_children.end()) {
      end = std::max(end, children->second);
      of_children.erase(children);
    }
    size_t& siblings = of_children.try_emplace(call->caller, 0).first->second;
    siblings = std::max(siblings, end);
  }
  std::stable_sort(calls.begin(), calls.end(),
                   [&](const GradientCall* a, const GradientCall* b) { return done[a] < done[b]; });
  return calls;
}

}  // namespace

GradientRecorder::GradientRecorder(CallRecorder* recorder, const Options& options)
    : subscriptions(recorder->subscriptions),
      recorder_(recorder),
      observe_(recorder->observer().observe_helper()),
      options_(options) {}

GradientRecorder::~GradientRecorder() {
  // Perhaps on a thread of the engine.
  if (Py_IsInitialized() == 0) {
    observe_.release();
    for (std::unique_ptr<Backward>& backward : backwards_) backward.release();
    return;
  }
  const py::gil_scoped_acquire lock;
  backwards_.clear();
  observe_ = py::object();
}

// ---- hooks ----------------------------------------------------------------------------------------------------------

void GradientRecorder::follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
                              std::shared_ptr<const void>* keep) {
  if (recorder_ == nullptr) return;
  const std::vector<Followed> followed = with_gradient(candidates, !options_.gradients);
  const bool has_graph = std::any_of(followed.begin(), followed.end(),
                                     [](const Followed& tensor) { return tensor.part == Part::output && tensor.node; });
  if ((!has_graph && keep == nullptr) || at::tracer::impl::is_dispatch_enabled()) return;
  const auto made = std::make_shared<GradientCall>(GradientCall{call});
  made->number = next_number_++;
  if (keep != nullptr && !has_graph) {
    made->start = nullptr;  // no graph tells when its gradients can come no more
    *keep = made;
  }
  Labels& labels = recorder_->observer().labels();
  for (const Followed& tensor : followed) {
    const GradientCandidate& candidate = *tensor.candidate;
    if (!has_graph && (tensor.part != Part::weight || tensor.node)) continue;
    // A tensor that the module writes into is its output after the call. The gradient of the input it was cannot be had
    // any more.
    const auto is_output_too = [&](const Followed& other) {
      return other.part == Part::output && other.is_same(tensor);
    };
    if (tensor.part == Part::input && tensor.node && std::any_of(followed.begin(), followed.end(), is_output_too))
      continue;
    if (tensor.part == Part::output && !tensor.node) continue;  // handed through
    if (size_t(candidate.label) >= labels_.size()) labels_.resize(size_t(candidate.label) + 1, -1);
    Labels::Id& label = labels_[size_t(candidate.label)];
    if (label < 0) label = labels.of_text(labels.text(candidate.label) + ".grad");
    const GradientUser user{made, tensor.part, label};
    if (tensor.node) {
      const auto nr = uint32_t(candidate.tensor.output_nr());
      tensor.node->add_tensor_pre_hook(
          std::make_unique<TensorHook>(weak_from_this(), static_cast<const void*>(&*tensor.node), nr, user));
    } else {
      find_or_add_hook(candidate.tensor)->add(weak_from_this(), user);
    }
  }
}

void GradientRecorder::stop(const std::vector<at::Tensor>& leaves) {
  if (recorder_ == nullptr) return;
  for (const at::Tensor& leaf : leaves) {
    if (autograd::impl::get_autograd_meta(leaf) == nullptr) continue;
    if (LeafHook* const hook = find_hook(autograd::impl::hooks(leaf))) hook->release(weak_from_this());
  }
  leave();
}

std::vector<GradientUser> GradientRecorder::users_now(const std::vector<GradientUser>& alive) {
  const int64_t task = autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_idle = [task](const GradientUser& user) {
    return user.part != Part::output && user.call->task != task;
  };
  std::vector<GradientUser> users;
  if (std::all_of(alive.begin(), alive.end(), is_idle)) {
    // A weight that is used past its module's call, or in compiled code: its latest call there was.
    const auto latest =
        std::find_if(alive.rbegin(), alive.rend(), [](const GradientUser& user) { return user.part == Part::weight; });
    if (latest != alive.rend()) users.push_back(*latest);
    return users;
  }
  for (const GradientUser& user : alive) {
    // A module may use a weight in several calls. The gradient is the sum over them, and belongs to the first call,
    // which the backward reaches last.
    const bool is_known = std::any_of(users.begin(), users.end(), [&](const GradientUser& other) {
      return user.part == Part::weight && other.call->node == user.call->node && other.label == user.label;
    });
    if (!is_known && !is_idle(user)) users.push_back(user);
  }
  return users;
}

// ---- a gradient comes -----------------------------------------------------------------------------------------------

// The Python object that keeps the recorder alive while it is used; none once gradients are no longer followed.
py::object GradientRecorder::kept_owner() const {
  return recorder_ == nullptr ? py::object() : py::cast(recorder_, py::return_value_policy::reference);
}

Backward* GradientRecorder::find(int64_t task) {
  for (const std::unique_ptr<Backward>& backward : backwards_)
    if (backward->task == task) return backward.get();
  return nullptr;
}

// True when this is the first gradient of its backward.
bool GradientRecorder::open(int64_t task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (find(task) != nullptr) return false;
    backwards_.push_back(std::make_unique<Backward>(task));
  }
  const auto end = std::make_shared<End>(weak_from_this(), task);
  autograd::Engine::get_default_engine().queue_callback([end] { end->over(true); });
  return true;
}

std::vector<double> GradientRecorder::losses() const {
  const size_t kept = std::min(num_losses_, losses_.size());
  std::vector<double> losses;
  for (size_t i = num_losses_ - kept; i < num_losses_; ++i) losses.push_back(losses_[i % losses_.size()]);
  return losses;
}

void GradientRecorder::on_gradient(const at::Tensor& gradient, const void* at, uint32_t nr,
                                   std::span<const GradientUser> users) {
  const int64_t task = autograd::get_current_graph_task_id();
  if (task < 0) return;
  if (!options_.gradients && is_finite(gradient)) {
    if (latest_task_.exchange(task) == task) return;
    const py::gil_scoped_acquire lock;
    if (recorder_ != nullptr) recorder_->keep_start(users[0].call->start);
    const std::optional<double> loss = loss_under_way();
    if (loss.has_value() && std::isfinite(*loss)) losses_[num_losses_++ % losses_.size()] = *loss;
    if (!loss.has_value() || std::isfinite(*loss)) return;
  }
  if (open(task) && subscriptions->has(kBackwardStart)) {
    const py::gil_scoped_acquire lock;
    const py::object keep = kept_owner();
    if (keep && !recorder_->notify("on_backward_start", py::make_tuple())) throw_error();
  }
  const GradientPlace place(at, nr, gradient);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Backward* const backward = find(task);
    if (backward == nullptr) return;
    // An argument of a call may get its gradient from elsewhere, too: the call itself has no part in this backward.
    if (users.size() == 1 && users[0].part == Part::input && users[0].call->task != task) return;
    if (backward->is_known(place)) return backward->add_known(users);
  }
  // Of its users the first alone: the innermost module whose output it is of. That module's backward runs now.
  if (box::BlackBox* const box = box::BlackBox::active(); box != nullptr && users[0].call->box != box::kUnnamed)
    box->gradient_came(users[0].call->box, uint32_t(users[0].part), users[0].call->batch);
  GradientEvent event{.row = {users[0].label, Role::gradient}};
  int64_t bytes = 0;
  if (!read(gradient, users[0].call->batch, &event, &bytes)) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Backward* const backward = find(task)) {
      backward->bytes_read += bytes;
      return backward->add_read(users, gradient, place, std::move(event));
    }
  }
  // Another thread of this backward has closed it.
  const py::gil_scoped_acquire lock;
  Py_XDECREF(event.row.python);
}

bool GradientRecorder::read(const at::Tensor& gradient, int64_t batch, GradientEvent* event, int64_t* bytes) {
  const bool is_made_by_python = options_.is_made_by_python(Role::gradient, batch);
  RecordData& row = event->row;
  View view{};
  if (!is_made_by_python) event->pending = enqueue_read(gradient);
  if (event->pending != nullptr || (plain_view(gradient, &view) && view.dims <= 255)) {
    *bytes = gradient.numel() * int64_t(word_size(*format_of(gradient.scalar_type())));
    row.describe(gradient);
    if (event->pending != nullptr) return true;
    row.range = range_cpu(view);
    if (row.range.isfinite && !is_made_by_python) return true;
  }
  row.python = record_from_python(gradient, row.label, batch);
  if (row.python == nullptr) return false;
  const py::gil_scoped_acquire lock;
  event->has_nonfinite = is_nonfinite(row);
  return true;
}

PyObject* GradientRecorder::record_from_python(const at::Tensor& gradient, Labels::Id label, int64_t batch) {
  const py::gil_scoped_acquire lock;
  if (recorder_ == nullptr) return nullptr;
  const OutsideCompiler outside;
  const std::string text = recorder_->observer().labels().text(label);
  const py::object wrapped = wrap(gradient);
  PyObject* row = wrapped ? PyObject_CallFunction(observe_.ptr(), "OssOL", wrapped.ptr(), text.c_str(), "gradient",
                                                  Py_False, static_cast<long long>(batch))
                          : nullptr;
  if (row == nullptr && !show_error()) throw_error();
  return row;
}

PendingRowPtr GradientRecorder::enqueue_read(const at::Tensor& gradient) {
  const NanwatchBackend* const backend = RowTable::backend();
  if (options_.waits_for_calls || backend == nullptr) return nullptr;
  if (backend->takes_host_memory == 0 && gradient.is_cpu()) return nullptr;
  const py::gil_scoped_acquire lock;
  const py::object keep = kept_owner();
  return keep ? recorder_->observer().enqueue_read(gradient) : nullptr;
}

// ---- the end of a backward ------------------------------------------------------------------------------------------

std::unique_ptr<Backward> GradientRecorder::take(int64_t task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_it = [task](const std::unique_ptr<Backward>& backward) { return backward->task == task; };
  const auto place = std::find_if(backwards_.begin(), backwards_.end(), is_it);
  if (place == backwards_.end()) return nullptr;
  std::unique_ptr<Backward> backward = std::move(*place);
  backwards_.erase(place);
  return backward;
}

void GradientRecorder::over(int64_t task, bool completed) {
  if (!completed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Backward* const backward = find(task)) backward->is_over = true;
    return;
  }
  if (box::BlackBox* const box = box::BlackBox::active()) box->backward_ends();
  const py::gil_scoped_acquire lock;
  const py::object keep = kept_owner();
  if (keep && !survived([&] { return finish(take(task)); })) throw_error();
}

bool GradientRecorder::finish(std::unique_ptr<Backward> backward) {
  CallRecorder* const recorder = recorder_;
  if (recorder == nullptr || !backward || recorder->paused) return true;
  if (const std::vector<PendingRowPtr> rows = backward->pending_rows(); !rows.empty()) RowTable::instance()->wait(rows);
  return report(*recorder, *backward);
}

bool GradientRecorder::finish_broken_backwards() {
  const std::shared_ptr<GradientRecorder> keep = shared_from_this();
  while (recorder_ != nullptr) {  // a callback may stop the watch
    const int64_t task = broken_backward();
    if (task < 0) return true;
    if (!finish(take(task))) return false;
  }
  return true;
}

int64_t GradientRecorder::broken_backward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t task = -1;
  for (const std::unique_ptr<Backward>& backward : backwards_)
    if (backward->is_over) task = backward->task;
  return task;
}

bool GradientRecorder::finish_nonfinite_backward() {
  const std::shared_ptr<GradientRecorder> keep = shared_from_this();
  const int64_t task = autograd::get_current_graph_task_id();
  if (recorder_ == nullptr) return true;
  std::vector<PendingRowPtr> rows;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const Backward* const backward = find(task)) rows = backward->pending_rows();
  }
  if (!rows.empty()) RowTable::instance()->wait(rows);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Backward* const backward = find(task);
    if (backward == nullptr) return true;
    backward->take_completed();
    if (!backward->has_nonfinite) return true;
  }
  return finish(take(task));
}

// ---- the frames of what came in a backward --------------------------------------------------------------------------

void Backward::add(std::span<const GradientUser> users, const GradientPlace& place, const GradientEvent& event) {
  arrivals += !(place == latest_);
  latest_ = place;
  has_nonfinite |= event.has_nonfinite;
  for (const GradientUser& user : users) {
    if (user.part == Part::output) user.call->task = task;
    events.push_back({user, arrivals, event.has_nonfinite, event.row, event.pending});
  }
}

void Backward::add_read(std::span<const GradientUser> users, const at::Tensor& gradient, const GradientPlace& place,
                        GradientEvent read) {
  ++tensors_read;
  read.row.shape_at = uint32_t(shapes.size());
  if (read.row.python != nullptr) {
    python_rows.push_back(pybind11::reinterpret_steal<pybind11::object>(read.row.python));
  } else {
    shapes.insert(shapes.end(), gradient.sizes().begin(), gradient.sizes().end());
  }
  add(users, place, read);
}

std::vector<PendingRowPtr> Backward::pending_rows() const {
  std::vector<PendingRowPtr> rows;
  for (const GradientEvent& event : events)
    if (event.pending != nullptr && !event.pending->poll()) rows.push_back(event.pending);
  return rows;
}

void Backward::take_completed() {
  for (GradientEvent& event : events) {
    if (event.pending == nullptr || event.pending->state != PendingRow::State::completed) continue;
    event.row.range = event.pending->range;
    event.has_nonfinite = !event.row.range.isfinite;
    has_nonfinite |= event.has_nonfinite;
  }
}

// Makes the frames of a backward and calls `on_backward_end`, which may stop the watch.
bool GradientRecorder::report(CallRecorder& recorder, Backward& backward) {
  CallObserver& observer = recorder.observer();
  FrameRing& ring = recorder.ring();
  backward.take_completed();
  observer.counters.tensors += int64_t(backward.events.size());
  observer.counters.tensors_read += backward.tensors_read;
  observer.counters.bytes_read += backward.bytes_read;
  observer.counters.cache_hits += int64_t(backward.events.size()) - backward.tensors_read;
  std::vector<const GradientCall*> calls = calls_of(backward);
  observer.counters.frames += int64_t(calls.size());
  if (!backward.has_nonfinite && !recorder.traces() && calls.size() > ring.capacity()) {
    const auto first_kept = calls.end() - int64_t(ring.capacity());
    std::for_each(calls.begin(), first_kept, [&ring](const GradientCall* call) { ring.skip(call->batch); });
    calls.erase(calls.begin(), first_kept);  // they would be overwritten at once
  }
  std::unordered_map<int64_t, size_t> positions;  // by the id of the call
  for (const GradientCall* call : calls) positions.emplace(call->id, positions.size());
  std::vector<OpenFrame> frames(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const GradientCall& call = *calls[i];
    static_cast<FrameHead&>(frames[i]) = {call.batch, call.node, call.class_name, call.recomputed, Phase::backward};
  }
  py::list events;
  for (const GradientEvent& event : backward.events) {
    RecordData row = event.row;
    row.label = event.user.label;
    if (recorder.gathers_gradient_peaks) recorder.add_gradient_peak(event.user.call->batch, event.user.call->node, row);
    const auto position = positions.find(event.user.call->id);
    if (position == positions.end()) continue;
    OpenFrame& frame = frames[position->second];
    if (row.python != nullptr) {
      const py::str label(observer.labels().text(row.label));
      row.python = with_item(row.python, record_item::label, label).release().ptr();
    }
    if (event.pending != nullptr) {
      row.pending = int32_t(frame.pending.rows.size());
      frame.pending.rows.push_back(event.pending);
    }
    row.shape_at = uint32_t(frame.shapes.size());
    if (row.python == nullptr) {
      const auto shape = backward.shapes.begin() + event.row.shape_at;
      frame.shapes.insert(frame.shapes.end(), shape, shape + row.dims);
    }
    frame.has_nonfinite |= event.has_nonfinite;
    if (backward.has_nonfinite)
      events.append(
          py::make_tuple(position->second, frame.records.size(), kParts[int(event.user.part)], event.arrival));
    frame.add(row);
  }
  const Node nobody;
  for (OpenFrame& frame : frames)
    if (!observer.resolve(nobody, &frame)) return false;
  // Reported before the frames are kept: the callback finds the frames that led here still in the ring.
  py::list reported;
  bool done = true;
  for (size_t i = 0; i < frames.size() && done; ++i) {
    const bool traced = recorder.is_traced(frames[i].batch);
    if (!backward.has_nonfinite && !traced) continue;
    const py::object frame_object = recorder.to_python(frames[i]);
    const auto caller = positions.find(calls[i]->caller);
    reported.append(py::make_tuple(
        frame_object, caller == positions.end() ? py::object(py::none()) : py::int_(caller->second), calls[i]->number));
    done = !traced || recorder.notify("on_frame", py::make_tuple(frame_object));
  }
  if (done && backward.has_nonfinite) done = recorder.notify("on_backward_end", py::make_tuple(reported, events));
  for (OpenFrame& frame : frames) recorder.keep(frame);
  return done;
}

void GradientRecorder::excuse(FrameRing& ring, const std::vector<int64_t>& batches, const py::object& note) {
  const bool collects = PyGC_Disable() != 0;  // it may run code that calls a model, and that call moves the frames
  for (size_t i = 0; i < ring.size(); ++i) {
    FrameData& frame = ring.oldest(i);
    if (frame.phase != Phase::backward || std::find(batches.begin(), batches.end(), frame.batch) == batches.end())
      continue;
    frame.has_nonfinite = false;
    for (RecordData& row : frame.records) {
      if (row.python == nullptr || PyTuple_GET_ITEM(row.python, record_item::isfinite) != Py_False) continue;
      Py_SETREF(row.python, with_item(row.python, record_item::note, note).release().ptr());
    }
  }
  if (collects) PyGC_Enable();
}

}  // namespace nanwatch
