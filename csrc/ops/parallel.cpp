#include "cpu/parallel.h"

#include <ATen/Parallel.h>

namespace nanwatch {

void parallel_for(int64_t count, int64_t grain, ParallelWork work, const void* context) {
  at::parallel_for(0, count, grain, [work, context](int64_t begin, int64_t end) { work(context, begin, end); });
}

}  // namespace nanwatch
