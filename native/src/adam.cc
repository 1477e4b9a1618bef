#include "lohan/adam.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "adam_kernels.h"

namespace lohan {
namespace {

// 16 blocks (about 1 MiB of traffic) per task: few enough to keep the shared counter cold, many enough to
// balance a 1 Mi-element array over 16 threads.
constexpr int64_t kBlocksPerTask = 16;

/// The default rounding mode and no flush-to-zero while it lives. Worker threads inherit whatever mode their
/// creator had, and results must depend neither on that nor on the caller's.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

const char* NameOf(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAuto:
      return "AUTO";
    case InstructionSet::kPortable:
      return "PORTABLE";
    case InstructionSet::kAvx2:
      return "AVX2";
    case InstructionSet::kAvx512:
      return "AVX512";
  }
  return "unknown";
}

const AdamKernels& KernelsOf(InstructionSet set) {
  const std::vector<InstructionSet> available = AvailableInstructionSets();
  if (set == InstructionSet::kAuto) set = available.back();
  if (std::find(available.begin(), available.end(), set) == available.end()) {
    throw std::invalid_argument(std::string("this processor does not have the instruction set ") +
                                NameOf(set));
  }
#ifdef LOHAN_X86_KERNELS
  if (set == InstructionSet::kAvx512) return kAvx512Kernels;
  if (set == InstructionSet::kAvx2) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

/// A segment as the block loop needs it.
struct Range {
  int64_t begin;
  int64_t end;
  AdamScalars scalars;
};

AdamScalars ScalarsOf(const AdamSegment& segment) {
  const double first_correction = 1.0 - std::pow(segment.beta1, static_cast<double>(segment.step));
  const double second_correction = 1.0 - std::pow(segment.beta2, static_cast<double>(segment.step));
  return {
      .decay = static_cast<float>(1.0 - segment.learning_rate * segment.weight_decay),
      .first_weight = static_cast<float>(1.0 - segment.beta1),
      .beta2 = static_cast<float>(segment.beta2),
      .second_weight = static_cast<float>(1.0 - segment.beta2),
      .step_size = static_cast<float>(segment.learning_rate / first_correction),
      .second_correction_sqrt = static_cast<float>(std::sqrt(second_correction)),
      .epsilon = static_cast<float>(segment.epsilon),
  };
}

[[noreturn]] void BadSegment(const AdamSegment& segment, const std::string& reason) {
  throw std::invalid_argument("segment at offset " + std::to_string(segment.offset) + " of length " +
                              std::to_string(segment.length) + ": " + reason);
}

std::vector<Range> SortedRanges(std::span<const AdamSegment> segments, int64_t length) {
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
  std::vector<Range> ranges;
  ranges.reserve(sorted.size());
  for (const AdamSegment& segment : sorted) {
    if (!ranges.empty() && segment.offset < ranges.back().end) {
      BadSegment(segment, "overlaps the segment that ends at " + std::to_string(ranges.back().end));
    }
    ranges.push_back({segment.offset, segment.offset + segment.length, ScalarsOf(segment)});
  }
  return ranges;
}

/// One pass over the arrays, in blocks that any thread may take.
struct Pass {
  const AdamKernels& kernels;
  const GradientArray& gradients;
  float gradient_scale;
  const std::vector<Range>* ranges;  // null: all elements, norm only
  AdamState state;

  void Load(int64_t begin, int64_t end, float* target) const {
    if (gradients.type == GradientType::kFloat32) {
      kernels.load_float32(static_cast<const float*>(gradients.data) + begin, gradient_scale, target,
                           end - begin);
    } else {
      kernels.load_bfloat16(static_cast<const uint16_t*>(gradients.data) + begin, gradient_scale, target,
                            end - begin);
    }
  }

  void Update(const Range& range, int64_t begin, int64_t end, const float* scaled) const {
    kernels.update(range.scalars, scaled, state.master + begin, state.first_moment + begin,
                   state.second_moment + begin, end - begin);
    if (state.weights_out != nullptr) {
      kernels.store_bfloat16(state.master + begin, state.weights_out + begin, end - begin);
    }
  }

  BlockNorm RunBlock(int64_t block) const {
    const int64_t block_begin = block * kBlockElements;
    const int64_t block_end = std::min(block_begin + kBlockElements, gradients.length);
    alignas(64) float scaled[kBlockElements];
    if (ranges == nullptr) {
      Load(block_begin, block_end, scaled);
      std::fill(scaled + (block_end - block_begin), scaled + kBlockElements, 0.0f);
      return kernels.norm(scaled);
    }
    auto range = std::partition_point(ranges->begin(), ranges->end(),
                                      [&](const Range& r) { return r.end <= block_begin; });
    int64_t filled = block_begin;  // everything before it in the block is loaded or zero
    for (; range != ranges->end() && range->begin < block_end; ++range) {
      const int64_t begin = std::max(range->begin, block_begin);
      const int64_t end = std::min(range->end, block_end);
      std::fill(scaled + (filled - block_begin), scaled + (begin - block_begin), 0.0f);
      Load(begin, end, scaled + (begin - block_begin));
      Update(*range, begin, end, scaled + (begin - block_begin));
      filled = end;
    }
    if (filled == block_begin) return {0.0, 0};
    std::fill(scaled + (filled - block_begin), scaled + kBlockElements, 0.0f);
    return kernels.norm(scaled);
  }
};

/// Adds neighbours in pairs until one is left: the tree depends on the number of blocks alone.
double SumOfPairs(std::vector<double>& values) {
  if (values.empty()) return 0.0;
  for (size_t count = values.size(); count > 1; count = (count + 1) / 2) {
    for (size_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2 == 1) values[count / 2] = values[count - 1];
  }
  return values[0];
}

UpdateResult RunPass(const Pass& pass, ThreadPool& pool) {
  const int64_t blocks = (pass.gradients.length + kBlockElements - 1) / kBlockElements;
  std::vector<double> squared_norms(static_cast<size_t>(blocks));
  std::vector<int64_t> non_finite(static_cast<size_t>((blocks + kBlocksPerTask - 1) / kBlocksPerTask));
  pool.Run(static_cast<int64_t>(non_finite.size()), [&](int64_t task) {
    DefaultFloatEnvironment environment;
    const int64_t last = std::min((task + 1) * kBlocksPerTask, blocks);
    for (int64_t block = task * kBlocksPerTask; block < last; ++block) {
      const BlockNorm norm = pass.RunBlock(block);
      squared_norms[static_cast<size_t>(block)] = norm.squared_norm;
      non_finite[static_cast<size_t>(task)] += norm.non_finite;
    }
  });
  UpdateResult result;
  result.squared_norm = SumOfPairs(squared_norms);
  if (std::isnan(result.squared_norm)) result.squared_norm = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t count : non_finite) result.non_finite += count;
  return result;
}

float CheckedScale(double gradient_scale) {
  if (!(std::abs(gradient_scale) <= std::numeric_limits<float>::max())) {
    throw std::invalid_argument("gradient_scale is " + std::to_string(gradient_scale) +
                                "; it must be finite in fp32");
  }
  return static_cast<float>(gradient_scale);
}

}  // namespace

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

std::vector<InstructionSet> AvailableInstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kPortable};
#ifdef LOHAN_X86_KERNELS
  if (__builtin_cpu_supports("avx2")) sets.push_back(InstructionSet::kAvx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(InstructionSet::kAvx512);
  }
#endif
  return sets;
}

UpdateResult AdamwUpdate(std::span<const AdamSegment> segments, const GradientArray& gradients,
                         const AdamState& state, double gradient_scale, ThreadPool& pool,
                         InstructionSet instruction_set) {
  DefaultFloatEnvironment environment;
  const std::vector<Range> ranges = SortedRanges(segments, gradients.length);
  return RunPass({KernelsOf(instruction_set), gradients, CheckedScale(gradient_scale), &ranges, state}, pool);
}

UpdateResult GradientNorm(const GradientArray& gradients, double gradient_scale, ThreadPool& pool,
                          InstructionSet instruction_set) {
  DefaultFloatEnvironment environment;
  return RunPass({KernelsOf(instruction_set), gradients, CheckedScale(gradient_scale), nullptr, {}}, pool);
}

}  // namespace lohan
