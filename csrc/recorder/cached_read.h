// Templates of CallObserver that decide whether a tensor has to be read, or is unchanged since it was last read. They
// serve reads on the host and on a device. The two differ in what a row is (RangeRow, PendingRowPtr), and each is a
// reader:
//
//   Row read()                             reads the tensor
//   bool knows(const CacheEntry& entry)     whether the entry has a row for it
//   Row hit(const CacheEntry& entry)        that row
//   bool keeps(const Row& row)             whether to remember it
#pragma once

#include "recorder/call_observer.h"

namespace nanwatch {

template <typename Row, typename Reader>
Row CallObserver::weight_range(const at::Tensor& x, int64_t batch, int64_t lifetime, Node::Slot* slot, Reader& reader) {
  const Content content(x, epoch_);
  find_entry(content.key, slot);
  const CacheEntry& known = slot->cached->entry;
  const bool unchanged = known.content.has_same_version(content);
  if (unchanged && known.content.epoch == epoch_ && batch - known.batch < lifetime && reader.knows(known))
    return reader.hit(known);
  // While the lock is released for the read, another thread may drop the slot's entry, or the slot.
  const std::shared_ptr<WeightEntry> cached = slot->cached;
  const Row row = reader.read();
  if (reader.keeps(row)) {
    // Each weight starts at another age, so that no batch comes in which all are read again.
    const int64_t age = unchanged ? 0 : first_entries_++ % lifetime;
    cached->take(x, content, row, batch - age);
  } else {
    cached->entry.forget();  // a non-finite tensor is examined each time
  }
  return row;
}

template <typename Row, typename Reader>
Row CallObserver::range_of(PyObject* object, int64_t batch, Memory memory, Node::Slot* slot, Reader reader) {
  const at::Tensor& x = THPVariable_Unpack(object);
  ++counters.tensors;
  if (memory == Memory::none || !can_be_remembered(x)) return reader.read();
  if (memory == Memory::weight) return weight_range<Row>(x, batch, options_.reread_weights, slot, reader);
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass) {
    // A weight handed around: torch.utils.swap_tensors refuses a parameter that has weak references.
    Node::Slot passing;
    return weight_range<Row>(x, batch, 1, &passing, reader);
  }
  const Content content(x, epoch_);
  const CacheEntry* entry = activations_.find(content);
  if (entry != nullptr && entry->content.epoch == epoch_ && entry->batch == batch && reader.knows(*entry))
    return reader.hit(*entry);
  const Row row = reader.read();
  if (reader.keeps(row)) activations_.remember(object, content, row, batch);
  return row;
}

// Fills the frame by make(). Where no device takes what the frame asks for, it is made anew without them.
template <typename Make>
bool CallObserver::fill_once(const Node& node, FrameData* frame, const Make& make) {
  if (!make()) return false;
  if (frame->pending.empty()) return true;
  if (const int error = table_->send(&frame->pending)) {
    const bool for_good = RowTable::backend()->cannot_run(error) != 0;
    frame->start_over();
    devices_off_ = true;
    const bool done = make();
    devices_off_ = for_good;
    return done;
  }
  return complete(node, frame);
}

template <typename Make>
bool CallObserver::fill_frame(const Node& node, FrameData* frame, const Make& make) {
  bool done = fill_once(node, frame, make);
  if (done && frame->has_nonfinite) {
    // Read every tensor of a non-finite call again: memory behind a cached range may have changed unseen.
    frame->start_over();
    frame->reads_all = true;
    done = fill_once(node, frame, make);
    frame->reads_all = false;
  }
  return done;
}

}  // namespace nanwatch
