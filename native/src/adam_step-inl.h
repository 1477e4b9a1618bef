// The arithmetic of one step that all forms of the state share, and what becomes of NaN. Part of adam-inl.h.

#pragma once

#include "adam_arrays-inl.h"
#include "vector-inl.h"

namespace lohan {
namespace {

struct Constants {
  Floats decay, first_weight, beta2, second_weight, root_weight, epsilon;

  explicit Constants(const AdamScalars& s)
      : decay(Broadcast(s.decay)),
        first_weight(Broadcast(s.first_weight)),
        beta2(Broadcast(s.beta2)),
        second_weight(Broadcast(s.second_weight)),
        root_weight(Broadcast(s.root_weight)),
        epsilon(Broadcast(s.epsilon)) {}
};

/// The new master weight from the new moments, the second one as its square root.
inline Floats Step(const Constants& c, Floats master, Floats first, Floats root) {
  return master * c.decay - first / (root * c.root_weight + c.epsilon);
}

/// Finds NaN among new master weights; a NaN in a moment is one in its weight too. NaN is so rare that
/// looking at sums, once a block, is cheaper than making every value canonical.
struct NanWatch {
  Floats sum = {};

  void Add(Floats masters) { sum += masters; }  // opposite infinities make one too, which does no harm
  bool Seen() const { return AnyNan(sum); }
};

/// Makes every NaN among the new master weights of elements [begin, end) the canonical one. Reads and writes
/// what this thread stored, also by streaming: a thread's own loads and stores of a place keep their order.
template <MasterKernel kMaster>
void CanonicalizeMasters(const AdamState& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    GroupCopy<float> copy;
    const AdamState state = copy.State();
    CopyMasterIn<kMaster>(out, i, i + 1, i, state);
    const Floats master = CanonicalNan(MasterOf<kMaster>::LoadFrom(state, 0));
    MasterOf<kMaster>::template StoreTo<StoreKind::kOrdinary>(master, master, state, 0);
    CopyMasterOut<kMaster>(state, i, i + 1, i, out);
  }
}

inline void CanonicalizeMoments(float* moments, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (moments[i] != moments[i]) moments[i] = __builtin_bit_cast(float, 0x7FC00000u);
  }
}

}  // namespace
}  // namespace lohan
