// The rows of would_fit's block formats, for bindings.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "numerics/block_format.h"

namespace nanwatch {

// Returns rows (formats, units, kFitItems) on the tensor's device, made by one launch for each format, and does not
// wait. Nothing for a tensor that nanwatch_cuda_block_fit does not take, and where the kernels cannot run. `amax`: the
// largest magnitude of the whole tensor, a float64 on the device, for a format with a scale for the tensor.
std::optional<at::Tensor> block_fit_cuda(const at::Tensor& x, const std::vector<BlockFormat>& formats,
                                         const std::optional<at::Tensor>& amax);

}  // namespace nanwatch
