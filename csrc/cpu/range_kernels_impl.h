// The table of the kernels of one instruction set, `S`. In an unnamed namespace, for the target of the including file.
#pragma once

#include "cpu/health_loop_impl.h"
#include "cpu/vectors_impl.h"

namespace nanwatch {
namespace {

template <class S>
constexpr KernelTable make_kernels(const char* name) {
  KernelTable table{};
  table.name = name;
#define NANWATCH_KERNELS(name, ...)                              \
  table.range[int(Format::name)] = range_plane<S, Format::name>; \
  table.health[int(Format::name)] = health_plane<S, Format::name>;
  NANWATCH_FORMATS(NANWATCH_KERNELS)
#undef NANWATCH_KERNELS
  return table;
}

}  // namespace
}  // namespace nanwatch
