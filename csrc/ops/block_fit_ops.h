// The rows of would_fit's block formats, for bindings.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "numerics/block_format.h"

namespace nanwatch {

// Of a plain CUDA tensor as nanwatch_cuda_block_fit takes it: (formats, units, kFitItems) on its device, in one launch
// for each format, without a wait. `amax`: a float64 on the device, for a format with a scale for the tensor. Nothing
// for other tensors, and where the kernels cannot run.
std::optional<at::Tensor> block_fit_cuda(const at::Tensor& x, const std::vector<BlockFormat>& formats,
                                         const std::optional<at::Tensor>& amax);

}  // namespace nanwatch
