#include "adam_segments.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace lohan {
namespace {

AdamScalars ScalarsOf(const AdamSegment& segment) {
  const auto step = static_cast<double>(segment.step);
  const double step_size = segment.learning_rate / (1.0 - std::pow(segment.beta1, step));
  const double root_weight = 1.0 / std::sqrt(1.0 - std::pow(segment.beta2, step)) / step_size;
  const double epsilon = segment.epsilon / step_size;
  // Beyond fp32's range (a step size of 0, or one too small for any weight that is not tiny itself) nothing
  // moves.
  const bool moves = std::max(root_weight, epsilon) <= std::numeric_limits<float>::max();
  return {
      .decay = static_cast<float>(1.0 - segment.learning_rate * segment.weight_decay),
      .beta1 = static_cast<float>(segment.beta1),
      .first_weight = static_cast<float>(1.0 - segment.beta1),
      .beta2 = static_cast<float>(segment.beta2),
      .beta2_root = static_cast<float>(std::sqrt(segment.beta2)),
      .second_weight = static_cast<float>(1.0 - segment.beta2),
      .root_weight = moves ? static_cast<float>(root_weight) : 0.0f,
      .epsilon = moves ? static_cast<float>(epsilon) : std::numeric_limits<float>::infinity(),
  };
}

[[noreturn]] void BadSegment(const AdamSegment& segment, const std::string& reason) {
  throw std::invalid_argument("segment at offset " + std::to_string(segment.offset) + " of length " +
                              std::to_string(segment.length) + ": " + reason);
}

/// With 8-bit moments a block belongs to one segment: it has one scale.
void CheckMomentBlocks(const std::vector<AdamSegment>& sorted) {
  int64_t owned = 0;  // the end of the last block that a segment touches
  for (const AdamSegment& segment : sorted) {
    if (segment.offset % kMomentBlockElements != 0 || segment.offset < owned) {
      BadSegment(segment, "with 8-bit moments a segment begins at a multiple of " +
                              std::to_string(kMomentBlockElements) +
                              ", past the last block of the segment before it");
    }
    const int64_t end = segment.offset + segment.length;
    owned = (end + kMomentBlockElements - 1) / kMomentBlockElements * kMomentBlockElements;
  }
}

}  // namespace

std::vector<AdamRange> SortedRanges(std::span<const AdamSegment> segments, int64_t length,
                                    MomentKernel moments) {
  std::vector<AdamSegment> sorted(segments.begin(), segments.end());
  for (const AdamSegment& segment : sorted) {
    segment.Validate();
    if (segment.offset > length || segment.length > length - segment.offset) {
      BadSegment(segment, "ends beyond the arrays' " + std::to_string(length) + " elements");
    }
  }
  std::erase_if(sorted, [](const AdamSegment& segment) { return segment.length == 0; });
  std::sort(sorted.begin(), sorted.end(),
            [](const AdamSegment& a, const AdamSegment& b) { return a.offset < b.offset; });
  std::vector<AdamRange> ranges;
  ranges.reserve(sorted.size());
  for (const AdamSegment& segment : sorted) {
    if (!ranges.empty() && segment.offset < ranges.back().end) {
      BadSegment(segment, "overlaps the segment that ends at " + std::to_string(ranges.back().end));
    }
    ranges.push_back({segment.offset, segment.offset + segment.length, ScalarsOf(segment)});
  }
  if (moments == kEightBitMoments) CheckMomentBlocks(sorted);
  return ranges;
}

void AdamSegment::Validate() const {
  const auto check = [this](bool valid, const char* name, double value, const char* allowed) {
    if (!valid) BadSegment(*this, std::string(name) + " is " + std::to_string(value) + "; " + allowed);
  };
  check(offset >= 0, "offset", static_cast<double>(offset), "it must be 0 or more");
  check(length >= 0, "length", static_cast<double>(length), "it must be 0 or more");
  check(learning_rate >= 0 && std::isfinite(learning_rate), "learning_rate", learning_rate,
        "it must be 0 or more and finite");
  check(beta1 >= 0 && beta1 < 1, "beta1", beta1, "it must be in [0, 1)");
  check(beta2 >= 0 && beta2 < 1, "beta2", beta2, "it must be in [0, 1)");
  check(epsilon >= 0 && std::isfinite(epsilon), "epsilon", epsilon, "it must be 0 or more and finite");
  check(weight_decay >= 0 && std::isfinite(weight_decay), "weight_decay", weight_decay,
        "it must be 0 or more and finite");
  check(step >= 1, "step", static_cast<double>(step), "it must be 1 or more (1 for the first update)");
}

}  // namespace lohan
