// A guard of CUDA devices that does nothing, for a torch without CUDA: fake tensors on a GPU can then be written to.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
