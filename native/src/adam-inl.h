// Body of the AdamW kernels; included once by each adam_<instruction set>.cc, which defines LOHAN_KERNELS and
// is compiled with that set's flags. The rules at the head of vector-inl.h hold here too.

#include "adam_arrays-inl.h"
#include "adam_kernels.h"
#include "dynamic_code.h"
#include "moment_code-inl.h"
#include "vector-inl.h"

namespace lohan {
namespace {

// ---------------------------------------------------------------- the update's arithmetic

struct Constants {
  Floats decay, first_weight, beta2, second_weight, step_size, inverse_second_correction, epsilon;

  explicit Constants(const AdamScalars& s)
      : decay(Broadcast(s.decay)),
        first_weight(Broadcast(s.first_weight)),
        beta2(Broadcast(s.beta2)),
        second_weight(Broadcast(s.second_weight)),
        step_size(Broadcast(s.step_size)),
        inverse_second_correction(Broadcast(s.inverse_second_correction)),
        epsilon(Broadcast(s.epsilon)) {}
};

struct Advanced {
  Floats master, first, second, root;
};

inline Advanced Advance(const Constants& c, Floats gradient, Floats master, Floats first, Floats second) {
  Advanced result;
  const Floats decayed = master * c.decay;
  result.first = CanonicalNan(first + c.first_weight * (gradient - first));
  result.second = CanonicalNan(c.beta2 * second + c.second_weight * (gradient * gradient));
  result.root = SquareRoot(result.second);
  const Floats denominator = result.root * c.inverse_second_correction + c.epsilon;
  result.master = CanonicalNan(decayed - c.step_size * (result.first / denominator));
  return result;
}

// ---------------------------------------------------------------- fp32 moments

template <GradientType kType, MasterKernel kMaster>
void UpdateFloat32Moments(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                          const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                          double* sums) {
  using Gradient = GradientOf<kType>;
  const auto* source = static_cast<const typename Gradient::Element*>(gradients);
  const Constants constants(scalars);
  const Floats scale = Broadcast(gradient_scale);
  const AdamState from = in, to = out;
  Sums accumulated(sums);
  const auto update = [&](const typename Gradient::Element* gradient_group, const AdamState& a,
                          const AdamState& b, int64_t group) {
    for (int vector = 0; vector < kGroup / kLanes; ++vector) {
      const int64_t i = group + vector * kLanes;
      const Floats gradient = Gradient::LoadFrom(gradient_group + vector * kLanes) * scale;
      accumulated.AddSquares(gradient, vector);
      const Advanced next = Advance(constants, gradient, MasterOf<kMaster>::LoadFrom(a, i),
                                    Load<Floats>(a.first_moment + i), Load<Floats>(a.second_moment + i));
      MasterOf<kMaster>::StoreTo(next.master, b, i);
      Store(next.first, b.first_moment + i);
      Store(next.second, b.second_moment + i);
    }
  };
  ForGroups(
      begin, end, [&](int64_t group) { update(source + group, from, to, group); },
      [&](int64_t first, int64_t last, int64_t group) {
        GroupCopy<typename Gradient::Element> copy;
        const AdamState state = copy.State();
        CopyIn(source, first, last, group, copy.gradients);
        CopyMasterIn<kMaster>(from, first, last, group, state);
        CopyIn(from.first_moment, first, last, group, copy.first_moment);
        CopyIn(from.second_moment, first, last, group, copy.second_moment);
        update(copy.gradients, state, state, 0);
        CopyMasterOut<kMaster>(state, first, last, group, to);
        CopyOut(copy.first_moment, first, last, group, to.first_moment);
        CopyOut(copy.second_moment, first, last, group, to.second_moment);
      });
  accumulated.StoreTo(sums);
}

// ---------------------------------------------------------------- 8-bit moments

/// The new moments of one block, before they are coded.
struct NewMoments {
  alignas(64) float first[kMomentBlockElements];
  alignas(64) float roots[kMomentBlockElements];
};

template <MomentCode kCode>
inline void EncodeBlock(const float* values, Ints largest, int64_t count, uint8_t* codes, float* scale) {
  constexpr bool kIsSigned = kCode == MomentCode::kFirst;
  const BlockScale block = ScaleOf(largest, kIsSigned ? kSignedCode.top : kUnsignedCode.top);
  *scale = block.scale;
  const Floats inverse = Broadcast(block.inverse);
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto group = Load<Floats>(values + i);
    if constexpr (kIsSigned) {
      // The sign is the value's own: an infinity times the inverse, zero, is a NaN of either sign.
      const Ints sign = __builtin_bit_cast(Ints, BitsOf(group) >> 24) & 0x80;
      StoreBytes(Encode<kSignedCode>(FromBits(BitsOf(group) & 0x7FFFFFFFu) * inverse) | sign, codes + i);
    } else {
      StoreBytes(Encode<kUnsignedCode>(group * inverse), codes + i);
    }
  }
}

template <GradientType kType, MasterKernel kMaster>
void UpdateEightBitMoments(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                           const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                           double* sums) {
  using Gradient = GradientOf<kType>;
  using Element = typename Gradient::Element;
  const auto* source = static_cast<const Element*>(gradients);
  const Constants constants(scalars);
  const Floats scale = Broadcast(gradient_scale);
  const AdamState from = in, to = out;
  Sums accumulated(sums);
  NewMoments moments;
  for (int64_t start = begin; start < end; start += kMomentBlockElements) {
    const int64_t stop = end - start < kMomentBlockElements ? end : start + kMomentBlockElements;
    const int64_t number = start / kMomentBlockElements;
    const Floats first_scale = Broadcast(from.first_scales[number]);
    const Floats second_scale = Broadcast(from.second_scales[number]);
    Ints largest_first = {}, largest_root = {};
    const auto update = [&](const Element* gradient_group, const AdamState& a, const AdamState& b,
                            int64_t group, int64_t place) {
      for (int vector = 0; vector < kGroup / kLanes; ++vector) {
        const int64_t i = group + vector * kLanes;
        const Floats gradient = Gradient::LoadFrom(gradient_group + vector * kLanes) * scale;
        accumulated.AddSquares(gradient, vector);
        const Floats root = DecodeRoot(a.second_codes + i, second_scale);
        const Advanced next = Advance(constants, gradient, MasterOf<kMaster>::LoadFrom(a, i),
                                      DecodeFirst(a.first_codes + i, first_scale), root * root);
        MasterOf<kMaster>::StoreTo(next.master, b, i);
        Store(next.first, moments.first + place + vector * kLanes);
        Store(next.root, moments.roots + place + vector * kLanes);
        largest_first = LargerMagnitude(largest_first, next.first);
        largest_root = LargerMagnitude(largest_root, next.root);
      }
    };
    ForGroups(
        start, stop, [&](int64_t group) { update(source + group, from, to, group, group - start); },
        [&](int64_t first, int64_t last, int64_t group) {
          GroupCopy<Element> copy;
          const AdamState state = copy.State();
          CopyIn(source, first, last, group, copy.gradients);
          CopyMasterIn<kMaster>(from, first, last, group, state);
          CopyIn(from.first_codes, first, last, group, copy.first_codes);
          CopyIn(from.second_codes, first, last, group, copy.second_codes);
          update(copy.gradients, state, state, 0, group - start);
          CopyMasterOut<kMaster>(state, first, last, group, to);
        });
    // A block that the segment does not fill is coded aside: what follows the segment keeps its codes.
    uint8_t first_codes[kMomentBlockElements], second_codes[kMomentBlockElements];
    const bool whole = stop - start == kMomentBlockElements;
    const int64_t padded = (stop - start + kGroup - 1) / kGroup * kGroup;
    EncodeBlock<MomentCode::kFirst>(moments.first, largest_first, padded,
                                    whole ? to.first_codes + start : first_codes, to.first_scales + number);
    EncodeBlock<MomentCode::kSecond>(moments.roots, largest_root, padded,
                                     whole ? to.second_codes + start : second_codes,
                                     to.second_scales + number);
    if (whole) continue;
    CopyOut(first_codes, start, stop, start, to.first_codes);
    CopyOut(second_codes, start, stop, start, to.second_codes);
  }
  accumulated.StoreTo(sums);
}

// ---------------------------------------------------------------- conversions and the memory reference

void SplitAll(const float* master, uint16_t* weights, int16_t* remainder, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Split(CanonicalNan(Load<Floats>(master + i)), weights + i, remainder + i);
  }
  if (i == count) return;
  float master_copy[kLanes] = {};
  uint16_t weights_copy[kLanes];
  int16_t remainder_copy[kLanes];
  CopyIn(master, i, count, i, master_copy);
  Split(CanonicalNan(Load<Floats>(master_copy)), weights_copy, remainder_copy);
  CopyOut(weights_copy, i, count, i, weights);
  CopyOut(remainder_copy, i, count, i, remainder);
}

void JoinAll(const uint16_t* weights, const int16_t* remainder, float* master, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(Join(weights + i, remainder + i), master + i);
  if (i == count) return;
  uint16_t weights_copy[kLanes] = {};
  int16_t remainder_copy[kLanes] = {};
  float master_copy[kLanes];
  CopyIn(weights, i, count, i, weights_copy);
  CopyIn(remainder, i, count, i, remainder_copy);
  Store(Join(weights_copy, remainder_copy), master_copy);
  CopyOut(master_copy, i, count, i, master);
}

template <MomentCode kCode>
void DecodeAll(const uint8_t* codes, const float* scales, float* moments, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats scale = Broadcast(scales[i / kMomentBlockElements]);
    uint8_t copy[kLanes] = {};
    const int64_t last = count - i < kLanes ? count : i + kLanes;
    CopyIn(codes, i, last, i, copy);
    Floats values;
    if constexpr (kCode == MomentCode::kFirst) {
      values = DecodeFirst(copy, scale);
    } else {
      values = DecodeRoot(copy, scale);
      values *= values;
    }
    float decoded[kLanes];
    Store(CanonicalNan(values), decoded);
    CopyOut(decoded, i, last, i, moments);
  }
}

void ReadModifyWrite(float* a, float* b, float* c, const float* d, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto source = Load<Floats>(d + i);
    Store(Load<Floats>(a + i) + source, a + i);
    Store(Load<Floats>(b + i) + source, b + i);
    Store(Load<Floats>(c + i) + source, c + i);
  }
  for (; i < count; ++i) {
    a[i] += d[i];
    b[i] += d[i];
    c[i] += d[i];
  }
}

#define LOHAN_UPDATES_OF(type, master) \
  {UpdateFloat32Moments<GradientType::type, master>, UpdateEightBitMoments<GradientType::type, master>}
#define LOHAN_UPDATES(type)                                                                   \
  {LOHAN_UPDATES_OF(type, kFloat32Master), LOHAN_UPDATES_OF(type, kFloat32MasterWithWeights), \
   LOHAN_UPDATES_OF(type, kSplitMaster)}

}  // namespace

const AdamKernels LOHAN_KERNELS = {
    {LOHAN_UPDATES(kFloat32), LOHAN_UPDATES(kBfloat16)},
    {AddSquares<GradientType::kFloat32>, AddSquares<GradientType::kBfloat16>},
    {CountNonFinite<GradientType::kFloat32>, CountNonFinite<GradientType::kBfloat16>},
    SplitAll,
    JoinAll,
    {DecodeAll<MomentCode::kFirst>, DecodeAll<MomentCode::kSecond>},
    ReadModifyWrite,
};

}  // namespace lohan
