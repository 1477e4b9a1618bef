// Body of the AdamW kernels; included once by each adam_<instruction set>.cc, which defines LOHAN_KERNELS and
// is compiled with that set's flags. The rules at the head of vector-inl.h hold here too. This file has the
// update of states with fp32 moments and the table of kernels.

#include "adam_convert-inl.h"
#include "adam_eight_bit-inl.h"
#include "adam_step-inl.h"

namespace lohan {
namespace {

template <GradientType kType, MasterKernel kMaster>
struct Float32Update {
  using Gradient = GradientOf<kType>;
  using Element = typename Gradient::Element;

  const Constants constants;
  const Floats gradient_scale;
  Sums sums;
  NanWatch watch = {};

  template <StoreKind kStore>
  Floats Advance(const Element* gradients, const AdamState& in, const AdamState& out, int64_t i, int vector) {
    const Floats gradient = Gradient::LoadFrom(gradients) * gradient_scale;
    const Floats square = gradient * gradient;
    sums.Add(square, vector);
    const auto old_first = Load<Floats>(in.first_moment + i);
    const Floats first = old_first + constants.first_weight * (gradient - old_first);
    const Floats second =
        constants.beta2 * Load<Floats>(in.second_moment + i) + constants.second_weight * square;
    const Floats master = Step(constants, MasterOf<kMaster>::LoadFrom(in, i), first, SquareRoot(second));
    watch.Add(master);
    Store<kStore>(first, out.first_moment + i);
    Store<kStore>(second, out.second_moment + i);
    return master;
  }

  /// One group; `gradients` are its own, `in` and `out` are indexed by `group`.
  template <StoreKind kStore>
  void Run(const Element* gradients, const AdamState& in, const AdamState& out, int64_t group) {
    for (int vector = 0; vector < kGroup / kLanes; vector += 2) {
      const int64_t i = group + vector * kLanes;
      const Element* source = gradients + vector * kLanes;
      const Floats first = Advance<kStore>(source, in, out, i, vector);
      const Floats second = Advance<kStore>(source + kLanes, in, out, i + kLanes, vector + 1);
      MasterOf<kMaster>::template StoreTo<kStore>(first, second, out, i);
    }
  }
};

template <GradientType kType, MasterKernel kMaster, StoreKind kStore>
void UpdateFloat32Moments(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                          const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                          float* block_sums) {
  using Element = typename GradientOf<kType>::Element;
  const auto* source = static_cast<const Element*>(gradients);
  const AdamState from = in, to = out;
  NanWatch watch;
  ForNormParts(begin, end, block_sums, [&](int64_t start, int64_t stop, float* sums) {
    Float32Update<kType, kMaster> update = {Constants(scalars), Broadcast(gradient_scale), Sums(sums)};
    ForGroups(
        start, stop,
        [&](int64_t group) {
          Prefetch(source + group);
          MasterOf<kMaster>::PrefetchAt(from, group);
          Prefetch(from.first_moment + group);
          Prefetch(from.second_moment + group);
          update.template Run<kStore>(source + group, from, to, group);
        },
        [&](int64_t first, int64_t last, int64_t group) {
          GroupCopy<Element> copy;
          const AdamState state = copy.State();
          CopyIn(source, first, last, group, copy.gradients);
          CopyMasterIn<kMaster>(from, first, last, group, state);
          CopyIn(from.first_moment, first, last, group, copy.first_moment);
          CopyIn(from.second_moment, first, last, group, copy.second_moment);
          update.template Run<StoreKind::kOrdinary>(copy.gradients, state, state, 0);
          CopyMasterOut<kMaster>(state, first, last, group, to);
          CopyOut(copy.first_moment, first, last, group, to.first_moment);
          CopyOut(copy.second_moment, first, last, group, to.second_moment);
        });
    update.sums.StoreTo(sums);
    watch.Add(update.watch.sum);
  });
  if (!watch.Seen()) return;
  CanonicalizeMasters<kMaster>(to, begin, end);
  CanonicalizeMoments(to.first_moment, begin, end);
  CanonicalizeMoments(to.second_moment, begin, end);
}

#define LOHAN_UPDATES_BY(update, type, master)               \
  {update<GradientType::type, master, StoreKind::kOrdinary>, \
   update<GradientType::type, master, StoreKind::kStreaming>}
#define LOHAN_UPDATES_OF(type, master)                   \
  {LOHAN_UPDATES_BY(UpdateFloat32Moments, type, master), \
   LOHAN_UPDATES_BY(UpdateEightBitMoments, type, master)}
#define LOHAN_UPDATES(type)                                                                   \
  {LOHAN_UPDATES_OF(type, kFloat32Master), LOHAN_UPDATES_OF(type, kFloat32MasterWithWeights), \
   LOHAN_UPDATES_OF(type, kSplitMaster)}

}  // namespace

const AdamKernels LOHAN_KERNELS = {
    {LOHAN_UPDATES(kFloat32), LOHAN_UPDATES(kBfloat16)},
    {AddSquares<GradientType::kFloat32>, AddSquares<GradientType::kBfloat16>},
    SumOf,
    {AddExactly<GradientType::kFloat32>, AddExactly<GradientType::kBfloat16>},
    SplitAll,
    JoinAll,
    {DecodeAll<MomentCode::kFirst>, DecodeAll<MomentCode::kSecond>},
    ReadModifyWrite,
};

}  // namespace lohan
