// Segments as the block loop needs them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "adam_kernels.h"
#include "lohan/adam.h"

namespace lohan {

/// Elements [begin, end) with their constants.
struct AdamRange {
  int64_t begin;
  int64_t end;
  AdamScalars scalars;
};

/// The non-empty segments in the order of their elements. Throws std::invalid_argument for what AdamwUpdate
/// refuses in segments.
std::vector<AdamRange> SortedRanges(std::span<const AdamSegment> segments, int64_t length,
                                    MomentKernel moments);

}  // namespace lohan
