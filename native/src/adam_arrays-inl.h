// How the AdamW kernels reach their arrays: gradients and master weights in their forms, groups that a range
// covers in part, and the squares that go into the norm. Part of adam-inl.h.
//
// Everything works in groups of kNormLanes elements that begin at multiples of kNormLanes. A range that
// covers a group in part goes through a copy of the group, so that every element meets the same instructions.

#pragma once

#include "adam_kernels.h"
#include "vector-inl.h"

namespace lohan {
namespace {

constexpr int64_t kGroup = kNormLanes;

// ---------------------------------------------------------------- loading and storing

template <GradientType kType>
struct GradientOf {
  using Element = float;
  static Floats LoadFrom(const float* source) { return Load<Floats>(source); }
};

template <>
struct GradientOf<GradientType::kBfloat16> {
  using Element = uint16_t;
  static Floats LoadFrom(const uint16_t* source) { return FromBits(LoadHalves(source) << 16); }
};

/// Rounds to nearest even; the values hold no NaN but the canonical one, whose rounding is itself.
inline void StoreBfloat16(Floats values, uint16_t* target) {
  const Words bits = BitsOf(values);
  // Adds just under half of the dropped 16 bits' range, and one more when the kept part is odd.
  StoreHalves((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, target);
}

inline Floats Join(const uint16_t* weights, const int16_t* remainder) {
  return FromBits((LoadHalves(weights) << 16) + __builtin_bit_cast(Words, LoadHalves(remainder)));
}

/// The values hold no NaN but the canonical one.
inline void Split(Floats values, uint16_t* weights, int16_t* remainder) {
  const Words bits = BitsOf(values);
  StoreHalves((bits + 0x8000u) >> 16, weights);
  // What the rounding left out lies in [-32768, 32767]: the low 16 bits, read as a signed number.
  StoreHalves(bits, remainder);
}

// ---------------------------------------------------------------- the norm

/// kNormLanes sums in registers.
struct Sums {
  Doubles parts[2 * kGroup / kLanes];

  explicit Sums(const double* sums) {
    for (int part = 0; part < 2 * kGroup / kLanes; ++part)
      parts[part] = Load<Doubles>(sums + part * (kLanes / 2));
  }
  void StoreTo(double* sums) const {
    for (int part = 0; part < 2 * kGroup / kLanes; ++part) Store(parts[part], sums + part * (kLanes / 2));
  }
  /// Adds the squares of the group's vector number `vector`; each is exact, as 2 x 24 bits fit in 53.
  void AddSquares(Floats values, int vector) {
    const Doubles low = LowerDoubles(values), high = UpperDoubles(values);
    parts[2 * vector] += low * low;
    parts[2 * vector + 1] += high * high;
  }
};

/// Calls body(group's first element) for whole groups and partial(begin, end within the group, its first
/// element) for the others.
template <typename Whole, typename Partial>
inline void ForGroups(int64_t begin, int64_t end, Whole&& whole, Partial&& partial) {
  int64_t group = begin / kGroup * kGroup;
  if (group < begin) {
    partial(begin, end < group + kGroup ? end : group + kGroup, group);
    group += kGroup;
  }
  for (; group + kGroup <= end; group += kGroup) whole(group);
  if (group < end) partial(group, end, group);
}

/// Copies elements [begin, end) of `source` to their places in a group's copy.
template <typename Element>
inline void CopyIn(const Element* source, int64_t begin, int64_t end, int64_t group, Element* copy) {
  __builtin_memcpy(copy + (begin - group), source + begin,
                   static_cast<uint64_t>(end - begin) * sizeof(Element));
}
template <typename Element>
inline void CopyOut(const Element* copy, int64_t begin, int64_t end, int64_t group, Element* target) {
  __builtin_memcpy(target + begin, copy + (begin - group),
                   static_cast<uint64_t>(end - begin) * sizeof(Element));
}

template <GradientType kType>
void AddSquares(const void* gradients, float gradient_scale, int64_t begin, int64_t end, double* sums) {
  using Gradient = GradientOf<kType>;
  const auto* source = static_cast<const typename Gradient::Element*>(gradients);
  const Floats scale = Broadcast(gradient_scale);
  Sums accumulated(sums);
  const auto add = [&](const typename Gradient::Element* group) {
    for (int vector = 0; vector < kGroup / kLanes; ++vector) {
      accumulated.AddSquares(Gradient::LoadFrom(group + vector * kLanes) * scale, vector);
    }
  };
  ForGroups(
      begin, end, [&](int64_t group) { add(source + group); },
      [&](int64_t first, int64_t last, int64_t group) {
        typename Gradient::Element copy[kGroup] = {};
        CopyIn(source, first, last, group, copy);
        add(copy);
      });
  accumulated.StoreTo(sums);
}

template <GradientType kType>
int64_t CountNonFinite(const void* gradients, float gradient_scale, int64_t begin, int64_t end) {
  const auto* source = static_cast<const typename GradientOf<kType>::Element*>(gradients);
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    float value;
    if constexpr (kType == GradientType::kFloat32) {
      value = source[i];
    } else {
      value = __builtin_bit_cast(float, static_cast<uint32_t>(source[i]) << 16);
    }
    value *= gradient_scale;
    count += (__builtin_bit_cast(uint32_t, value) & 0x7F800000u) == 0x7F800000u;
  }
  return count;
}

template <MasterKernel kMaster>
struct MasterOf {
  static Floats LoadFrom(const AdamState& in, int64_t i) {
    if constexpr (kMaster == kSplitMaster) return Join(in.weights + i, in.remainder + i);
    if constexpr (kMaster != kSplitMaster) return Load<Floats>(in.master + i);
  }

  static void StoreTo(Floats master, const AdamState& out, int64_t i) {
    if constexpr (kMaster == kSplitMaster) {
      Split(master, out.weights + i, out.remainder + i);
    } else {
      Store(master, out.master + i);
      if constexpr (kMaster == kFloat32MasterWithWeights) StoreBfloat16(master, out.weights + i);
    }
  }
};

/// A group's copy of the arrays that any form of the state has.
template <typename GradientElement>
struct GroupCopy {
  GradientElement gradients[kGroup] = {};
  float master[kGroup] = {}, first_moment[kGroup] = {}, second_moment[kGroup] = {};
  uint16_t weights[kGroup] = {};
  int16_t remainder[kGroup] = {};
  uint8_t first_codes[kGroup] = {}, second_codes[kGroup] = {};

  AdamState State() {
    return {master,      weights,      remainder, first_moment, second_moment,
            first_codes, second_codes, nullptr,   nullptr};
  }
};

template <MasterKernel kMaster>
void CopyMasterIn(const AdamState& in, int64_t begin, int64_t end, int64_t group, const AdamState& copy) {
  if constexpr (kMaster == kSplitMaster) {
    CopyIn(in.weights, begin, end, group, copy.weights);
    CopyIn(in.remainder, begin, end, group, copy.remainder);
  } else {
    CopyIn(in.master, begin, end, group, copy.master);
  }
}

template <MasterKernel kMaster>
void CopyMasterOut(const AdamState& copy, int64_t begin, int64_t end, int64_t group, const AdamState& out) {
  if constexpr (kMaster != kSplitMaster) CopyOut(copy.master, begin, end, group, out.master);
  if constexpr (kMaster == kSplitMaster) CopyOut(copy.remainder, begin, end, group, out.remainder);
  if constexpr (kMaster != kFloat32Master) CopyOut(copy.weights, begin, end, group, out.weights);
}

}  // namespace
}  // namespace lohan
