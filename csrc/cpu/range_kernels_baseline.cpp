// The kernels with vectors of 16 bytes: SSE2 on any x86-64, NEON on any AArch64.
#include "cpu/range_kernels_impl.h"

namespace nanwatch {

const KernelTable& baseline_kernels() {
  static constexpr KernelTable table = make_kernels<Vectors<16>>("baseline");
  return table;
}

}  // namespace nanwatch
