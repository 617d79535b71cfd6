// The part of CallObserver for calls in compiled code: plans, and records by a plan. A plan is a text made when the
// call was traced: the class, then a line for every value of the frame:
//   role (w b i o)  kind (t tensor, n None, x no tensor, u unread)  space  label  [tab  why it is not read]
#include <torch/csrc/utils/pybind.h>

#include "recorder/cached_read.h"
#include "recorder/call_observer.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

Role role_of(char letter) {
  switch (letter) {
    case 'w': return Role::weight;
    case 'b': return Role::buffer;
    case 'i': return Role::input;
    default: return Role::output;
  }
}

}  // namespace

std::shared_ptr<Node::Plan> CallObserver::plan_of(Node& node, std::string_view text) {
  for (const std::shared_ptr<Node::Plan>& known : node.plans)
    if (known->text == text) return known;
  // Shapes are no part of a plan: a module has one for each way it is called. Past any reason, the first one goes.
  if (node.plans.size() >= 64) node.plans.pop_front();
  const auto made = std::make_shared<Node::Plan>();
  node.plans.push_back(made);
  Node::Plan& plan = *made;
  plan.text = text;
  size_t end = text.find(kPlanSeparator);
  plan.class_name = text.substr(0, end);
  while (end != std::string_view::npos) {
    const size_t start = end + 1;
    end = text.find(kPlanSeparator, start);
    const std::string_view line = text.substr(start, end == std::string_view::npos ? end : end - start);
    if (line.size() < 3) continue;
    const size_t tab = line.find('\t');
    Node::Plan::Value value{{}, role_of(line[0]), line[1], ""};
    value.slot.label = labels_.of_text(std::string(line.substr(3, tab == std::string_view::npos ? tab : tab - 3)));
    if (tab != std::string_view::npos) value.reason = line.substr(tab + 1);
    plan.values.push_back(std::move(value));
  }
  return made;
}

bool CallObserver::compiled_records(Node& node, Node::Plan& plan, at::TensorList tensors, OpenFrame* frame) {
  size_t next = 0;
  std::vector<const void*> own;
  for (Node::Plan::Value& value : plan.values) {
    const Labels::Id label = value.slot.label;
    if (!options_.reads(value.role)) {
      next += value.kind == 't';
      continue;
    }
    if (value.kind != 't') {
      if (value.kind == 'u') {
        unread(label, value.role, value.reason, frame);
      } else {
        const NoteKind note = value.kind == 'n' ? NoteKind::absent : NoteKind::not_a_tensor;
        frame->add({label, value.role, note, -1, 0, 0, kNotPending, {}, nullptr});
      }
      continue;
    }
    if (next == tensors.size()) return true;  // a plan of another call
    const at::Tensor& x = tensors[next++];
    if (value.role == Role::weight || value.role == Role::buffer) {
      const void* identity = x.unsafeGetTensorImpl();  // a tensor under two names counts once
      if (std::find(own.begin(), own.end(), identity) != own.end()) continue;
      own.push_back(identity);
    }
    const py::object object = wrap(x);
    if (!object) {
      PyErr_Clear();
      unread(label, value.role, "Python has no object for it", frame);
      continue;
    }
    // Compiled code gives the memory of one activation to the next and has no version counter. So what is between
    // modules is read each time; a parameter is the user's own tensor, and is known again.
    const bool is_parameter =
        value.role == Role::weight && reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == ParameterClass;
    const bool is_own = value.role == Role::weight || value.role == Role::buffer;
    const Memory memory = is_parameter ? Memory::weight : is_own ? Memory::moving : Memory::none;
    if (!tensor(object.ptr(), label, value.role, node, memory, &value.slot, frame)) return false;
  }
  return true;
}

bool CallObserver::observe_compiled(Node& node, Node::Plan& plan, at::TensorList tensors, OpenFrame* frame) {
  return fill_frame(node, frame, [&] { return compiled_records(node, plan, tensors, frame); });
}

}  // namespace nanwatch
