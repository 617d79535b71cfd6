// The CUDA sources as a library of host code, with what a test may ask of the stand-in.
// clang-format off
#include "cuda_runtime.h"
#include "cuda/range_cuda.cu"
// clang-format on

extern "C" {

int64_t cuda_host_launches(void) {
  return std::exchange(cuda_host::state().launches, 0);
}
int64_t cuda_host_blocks(void) {
  return std::exchange(cuda_host::state().blocks, 0);
}
void cuda_host_shuffle_blocks(unsigned seed) {
  cuda_host::state().shuffle = seed;
}
void cuda_host_fail_next(int code) {
  cuda_host::state().fail_next = code;
}
void cuda_host_set_pending_error(int code) {
  cuda_host::state().last_error = code;
}
int cuda_host_pending_error(void) {
  return cuda_host::state().last_error;
}

}  // extern "C"
