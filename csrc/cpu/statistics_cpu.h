// Mean, root mean square, kurtosis and far elements of a strided piece of host memory, beside its range.
#pragma once

#include "cpu/range_cpu.h"

namespace nanwatch {

// Writes kStatisticsColumns doubles. All but the range are nan where an element is not finite, or where there is none.
void statistics_cpu(const View& view, double* row);

}  // namespace nanwatch
