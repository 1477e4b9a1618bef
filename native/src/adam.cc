#include "lohan/adam.h"

#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>
#include <limits>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "adam_kernels.h"
#include "adam_segments.h"

namespace lohan {
namespace {

// 16 blocks (about 1 MiB of traffic) per task: few enough to keep the shared counters cold, many enough to
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

/// Which kernel a state's arrays call for. Throws std::invalid_argument for arrays that make no state.
struct StateForm {
  MasterKernel master;
  MomentKernel moments;
};

StateForm FormOf(const AdamState& in, const AdamState& out) {
  const auto bad = [](const char* reason) { throw std::invalid_argument(reason); };
  const bool split = in.master == nullptr;
  if (split != (out.master == nullptr))
    bad("the old and the new state differ in the form of their master weights");
  if (split && (in.weights == nullptr || in.remainder == nullptr || out.weights == nullptr ||
                out.remainder == nullptr)) {
    bad("a state needs master, or both weights and remainder");
  }
  if (!split && (in.remainder != nullptr || out.remainder != nullptr)) {
    bad("a state has master or remainder, not both");
  }
  const auto moments_of = [&](const AdamState& state) {
    const bool eight_bit = state.first_codes != nullptr;
    const bool complete = eight_bit ? state.second_codes != nullptr && state.first_scales != nullptr &&
                                          state.second_scales != nullptr
                                    : state.first_moment != nullptr && state.second_moment != nullptr;
    if (!complete) bad("a state needs both moments, and with 8-bit codes their scales");
    return eight_bit ? kEightBitMoments : kFloat32Moments;
  };
  const MomentKernel moments = moments_of(in);
  if (moments != moments_of(out)) bad("the old and the new state differ in the form of their moments");
  return {split                    ? kSplitMaster
          : out.weights != nullptr ? kFloat32MasterWithWeights
                                   : kFloat32Master,
          moments};
}

constexpr uintptr_t kLineBytes = 64;

/// Streaming stores for a new state apart from the old one. A group of the kernels fills whole lines of every
/// array but the codes, whose moment blocks do, where the array begins at one: each line is then written by
/// one task, and at one go. On two cores of a Sapphire Rapids new split fp32 states come to 1.8 billion
/// elements a second, by ordinary stores to 1.2 (fp32 masters 1.7 and 1.1; 8-bit moments, which computing
/// bounds, 1.87 and 1.82). States that fit the caches and are used again from there lose; a step's do not
/// fit.
StoreKind StoresFor(const AdamState& in, const AdamState& out) {
  const bool apart = in.first_moment != out.first_moment || in.first_codes != out.first_codes;
  const void* const streams[] = {out.master,        out.weights,     out.remainder,   out.first_moment,
                                 out.second_moment, out.first_codes, out.second_codes};
  const bool aligned = std::all_of(std::begin(streams), std::end(streams), [](const void* stream) {
    return reinterpret_cast<uintptr_t>(stream) % kLineBytes == 0;
  });
  return apart && aligned ? StoreKind::kStreaming : StoreKind::kOrdinary;
}

/// Orders this thread's streaming stores before all that it stores after: before the pool hears that a task
/// is done.
void FenceStreamingStores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

using BlockSums = std::array<float, kNormSumsPerBlock>;

/// Adds neighbours in pairs until one is left: the tree depends on the number of blocks alone.
double SumOfPairs(std::vector<double>& values) {
  if (values.empty()) return 0.0;
  for (size_t count = values.size(); count > 1; count = (count + 1) / 2) {
    for (size_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2 == 1) values[count / 2] = values[count - 1];
  }
  return values[0];
}

/// Calls visit(range, begin, end) for the parts of the ranges that lie in [block_begin, block_end).
template <typename Visit>
void ForPartsIn(const std::vector<AdamRange>& ranges, int64_t block_begin, int64_t block_end,
                const Visit& visit) {
  auto range = std::partition_point(ranges.begin(), ranges.end(),
                                    [&](const AdamRange& r) { return r.end <= block_begin; });
  for (; range != ranges.end() && range->begin < block_end; ++range) {
    visit(*range, std::max(range->begin, block_begin), std::min(range->end, block_end));
  }
}

/// One pass over all blocks that touch a range. `add(range, begin, end, sums)` works on a part of one block
/// and adds the squares of its gradients to the block's sums; `stores` says how it writes its results.
template <typename Add>
UpdateResult RunPass(const AdamKernels& kernels, const GradientArray& gradients, float scale,
                     const std::vector<AdamRange>& ranges, ThreadPool& pool, StoreKind stores,
                     const Add& add) {
  const int64_t blocks = (gradients.length + kBlockElements - 1) / kBlockElements;
  const auto type = static_cast<size_t>(gradients.type);
  std::vector<double> squared_norms(static_cast<size_t>(blocks));
  std::vector<int64_t> non_finite(static_cast<size_t>((blocks + kBlocksPerTask - 1) / kBlocksPerTask));
  pool.Run(static_cast<int64_t>(non_finite.size()), [&](int64_t task) {
    DefaultFloatEnvironment environment;
    const int64_t last = std::min((task + 1) * kBlocksPerTask, blocks);
    for (int64_t block = task * kBlocksPerTask; block < last; ++block) {
      const int64_t begin = block * kBlockElements;
      const int64_t end = std::min(begin + kBlockElements, gradients.length);
      BlockSums sums = {};
      ForPartsIn(ranges, begin, end, [&](const AdamRange& range, int64_t first, int64_t stop) {
        add(range, first, stop, sums.data());
      });
      double& squared_norm = squared_norms[static_cast<size_t>(block)];
      squared_norm = kernels.sum_of(sums.data());
      if (std::isfinite(squared_norm)) continue;
      // A gradient is not finite, or is finite and has no square in fp32.
      ExactNorm norm = {0.0, 0};
      ForPartsIn(ranges, begin, end, [&](const AdamRange&, int64_t first, int64_t stop) {
        kernels.add_exactly[type](gradients.data, scale, first, stop, &norm);
      });
      squared_norm = norm.squared_norm;
      non_finite[static_cast<size_t>(task)] += norm.non_finite;
    }
    if (stores == StoreKind::kStreaming) FenceStreamingStores();
  });
  UpdateResult result;
  result.squared_norm = SumOfPairs(squared_norms);
  if (std::isnan(result.squared_norm)) result.squared_norm = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t count : non_finite) result.non_finite += count;
  return result;
}

/// Calls run(begin, end) on parts of [0, length) that begin at multiples of kBlockElements.
template <typename Run>
void ForParts(int64_t length, ThreadPool& pool, const Run& run) {
  constexpr int64_t kPart = kBlocksPerTask * kBlockElements;
  pool.Run((length + kPart - 1) / kPart, [&](int64_t part) {
    DefaultFloatEnvironment environment;
    run(part * kPart, std::min((part + 1) * kPart, length));
  });
}

float CheckedScale(double gradient_scale) {
  if (!(std::abs(gradient_scale) <= std::numeric_limits<float>::max())) {
    throw std::invalid_argument("gradient_scale is " + std::to_string(gradient_scale) +
                                "; it must be finite in fp32");
  }
  return static_cast<float>(gradient_scale);
}

}  // namespace

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
                         const AdamState& in, const AdamState& out, double gradient_scale, ThreadPool& pool,
                         InstructionSet instruction_set) {
  DefaultFloatEnvironment environment;
  // Empty arrays may have no address to tell the form by.
  const StateForm form = gradients.length == 0 ? StateForm{kFloat32Master, kFloat32Moments} : FormOf(in, out);
  const std::vector<AdamRange> ranges = SortedRanges(segments, gradients.length, form.moments);
  const AdamKernels& kernels = KernelsOf(instruction_set);
  const StoreKind stores = StoresFor(in, out);
  const AdamKernels::Update update = kernels.update[static_cast<size_t>(gradients.type)][form.master]
                                                   [form.moments][static_cast<size_t>(stores)];
  const float scale = CheckedScale(gradient_scale);
  return RunPass(kernels, gradients, scale, ranges, pool, stores,
                 [&](const AdamRange& range, int64_t begin, int64_t end, float* sums) {
                   update(range.scalars, gradients.data, scale, in, out, begin, end, sums);
                 });
}

UpdateResult GradientNorm(const GradientArray& gradients, double gradient_scale, ThreadPool& pool,
                          InstructionSet instruction_set) {
  DefaultFloatEnvironment environment;
  const AdamKernels& kernels = KernelsOf(instruction_set);
  const AdamKernels::AddSquares add = kernels.add_squares[static_cast<size_t>(gradients.type)];
  const float scale = CheckedScale(gradient_scale);
  const std::vector<AdamRange> everything = {{0, gradients.length, {}}};
  return RunPass(kernels, gradients, scale, everything, pool, StoreKind::kOrdinary,
                 [&](const AdamRange&, int64_t begin, int64_t end, float* sums) {
                   add(gradients.data, scale, begin, end, sums);
                 });
}

void SplitMaster(const float* master, uint16_t* weights, int16_t* remainder, int64_t length, ThreadPool& pool,
                 InstructionSet instruction_set) {
  const AdamKernels& kernels = KernelsOf(instruction_set);
  ForParts(length, pool, [&](int64_t begin, int64_t end) {
    kernels.split(master + begin, weights + begin, remainder + begin, end - begin);
  });
}

void JoinMaster(const uint16_t* weights, const int16_t* remainder, float* master, int64_t length,
                ThreadPool& pool, InstructionSet instruction_set) {
  const AdamKernels& kernels = KernelsOf(instruction_set);
  ForParts(length, pool, [&](int64_t begin, int64_t end) {
    kernels.join(weights + begin, remainder + begin, master + begin, end - begin);
  });
}

void DecodeMoment(MomentCode code, const uint8_t* codes, const float* scales, float* moments, int64_t length,
                  ThreadPool& pool, InstructionSet instruction_set) {
  const AdamKernels& kernels = KernelsOf(instruction_set);
  ForParts(length, pool, [&](int64_t begin, int64_t end) {
    kernels.decode[static_cast<size_t>(code)](codes + begin, scales + begin / kMomentBlockElements,
                                              moments + begin, end - begin);
  });
}

void ReadModifyWrite(float* a, float* b, float* c, const float* d, int64_t length, ThreadPool& pool,
                     InstructionSet instruction_set) {
  const AdamKernels& kernels = KernelsOf(instruction_set);
  ForParts(length, pool, [&](int64_t begin, int64_t end) {
    kernels.read_modify_write(a + begin, b + begin, c + begin, d + begin, end - begin);
  });
}

}  // namespace lohan
