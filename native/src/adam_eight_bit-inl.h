// The update of states with 8-bit moments. Part of adam-inl.h.

#pragma once

#include "adam_step-inl.h"
#include "moment_code-inl.h"

namespace lohan {
namespace {

/// The largest magnitudes seen of both moments, by lane.
struct Largest {
  Words first = {}, root = {};
};

/// One block's new moments on their way to weights and codes. Both are made in the same loop as the next
/// block's moments: each of the three waits long for its own square roots, quotients and look-ups, and none
/// for another's.
struct MomentBlock {
  alignas(64) float first[kMomentBlockElements];
  alignas(64) float roots[kMomentBlockElements];
  int64_t start;
  BlockScale first_scale, root_scale;
  uint8_t* first_codes;
  uint8_t* root_codes;
};

/// What coding a block needs, in registers: stores of bytes could change anything in memory.
class Encoder {
 public:
  explicit Encoder(const MomentBlock& block)
      : first_(block.first),
        roots_(block.roots),
        first_codes_(block.first_codes),
        root_codes_(block.root_codes),
        first_inverse_(Broadcast(block.first_scale.inverse)),
        root_inverse_(Broadcast(block.root_scale.inverse)) {}

  /// Codes kBytesStored elements. Codes that fill no line go by ordinary stores: by the time that the rest of
  /// the line comes, as many other streaming stores have passed as a core can hold open (AVX2, split: 6 %
  /// slower).
  template <StoreKind kStore>
  void Encode(int64_t place) const {
    constexpr StoreKind kCodeStore = kBytesStored == 64 ? kStore : StoreKind::kOrdinary;
    Ints first[4], roots[4];
    for (int vector = 0; vector < 4; ++vector) {
      first[vector] = EncodeFirst(Load<Floats>(first_ + place + vector * kLanes), first_inverse_);
      roots[vector] = EncodeRoot(Load<Floats>(roots_ + place + vector * kLanes), root_inverse_);
    }
    StoreBytes<Bytes::kSigned, kCodeStore>(first, first_codes_ + place);
    StoreBytes<Bytes::kUnsigned, kCodeStore>(roots, root_codes_ + place);
  }

 private:
  const float* const first_;
  const float* const roots_;
  uint8_t* const first_codes_;
  uint8_t* const root_codes_;
  const Floats first_inverse_, root_inverse_;
};

template <GradientType kType, MasterKernel kMaster, StoreKind kStore>
class EightBitUpdate {
  using Gradient = GradientOf<kType>;
  using Element = typename Gradient::Element;

 public:
  EightBitUpdate(const AdamScalars& scalars, const void* gradients, float gradient_scale, const AdamState& in,
                 const AdamState& out)
      : scalars_(scalars),
        constants_(scalars),
        gradient_scale_(Broadcast(gradient_scale)),
        gradients_(static_cast<const Element*>(gradients)),
        in_(in),
        out_(out) {}

  void Run(int64_t begin, int64_t end, float* block_sums) {
    MomentBlock blocks[2];
    MomentBlock* pending = nullptr;
    ForNormParts(begin, end, block_sums, [&](int64_t start, int64_t stop, float* sums) {
      MomentBlock& block = blocks[start / kMomentBlockElements % 2];
      if (stop - start < kMomentBlockElements) {
        RunPart(start, stop, block, sums);
        return;
      }
      if (pending == nullptr) {
        RunWhole<false>(start, block, block, sums);
      } else {
        RunWhole<true>(start, block, *pending, sums);
      }
      pending = &block;
    });
    if (pending != nullptr) Complete(*pending);
  }

 private:
  static_assert(kNormPartElements == kMomentBlockElements);
  static constexpr int64_t kTurn = kBytesStored > kGroup ? kBytesStored : kGroup;

  /// The new moments of one group, with all that they need in registers.
  struct NewMoments {
    const Floats first_weight, second_weight, gradient_scale;
    const Decoder decayed_first;  // of beta1 times the old first moment
    const Decoder decayed_root;   // of the square root of beta2 times the old second moment
    float* const first;
    float* const roots;
    Sums sums;
    Largest largest = {};

    /// `gradients` are the group's own; the codes are indexed by `group`, the results by `place`.
    void Run(const Element* gradients, const AdamState& in, int64_t group, int64_t place) {
      for (int vector = 0; vector < kGroup / kLanes; ++vector) {
        const int64_t i = vector * kLanes;
        const Floats gradient = Gradient::LoadFrom(gradients + i) * gradient_scale;
        const Floats square = gradient * gradient;
        sums.Add(square, vector);
        const Floats old_root = decayed_root.Root(in.second_codes + group + i);
        const Floats root = SquareRoot(old_root * old_root + second_weight * square);
        const Floats new_first = decayed_first.First(in.first_codes + group + i) + first_weight * gradient;
        Store(new_first, first + place + i);
        Store(root, roots + place + i);
        largest.first = LargerMagnitude(largest.first, new_first);
        largest.root = LargerBits(largest.root, root);
      }
    }
  };

  /// The new master weights of one group, from the new moments at `first` and `roots`.
  struct NewMasters {
    const Constants constants;
    NanWatch watch = {};

    template <StoreKind kHow>
    void Run(const float* first, const float* roots, const AdamState& in, const AdamState& out,
             int64_t group) {
      for (int64_t i = 0; i < kGroup; i += kPair) {
        const Floats a = Advance(first + i, roots + i, in, group + i);
        const Floats b = Advance(first + i + kLanes, roots + i + kLanes, in, group + i + kLanes);
        MasterOf<kMaster>::template StoreTo<kHow>(a, b, out, group + i);
      }
    }

    Floats Advance(const float* first, const float* roots, const AdamState& in, int64_t i) {
      const Floats master =
          Step(constants, MasterOf<kMaster>::LoadFrom(in, i), Load<Floats>(first), Load<Floats>(roots));
      watch.Add(master);
      return master;
    }
  };

  NewMoments MomentsOf(int64_t start, MomentBlock& block, const float* sums) const {
    const float first_scale = in_.first_scales[start / kMomentBlockElements];
    const float root_scale = in_.second_scales[start / kMomentBlockElements];
    return {constants_.first_weight,
            constants_.second_weight,
            gradient_scale_,
            Decoder(kSignedCode, scalars_.beta1 * first_scale),
            Decoder(kUnsignedCode, scalars_.beta2_root * root_scale),
            block.first,
            block.roots,
            Sums(sums)};
  }

  /// New moments of the block that begins at `start`; weights and codes of the pending one.
  template <bool kHasPending>
  void RunWhole(int64_t start, MomentBlock& block, const MomentBlock& pending, float* sums) {
    const AdamState in = in_, out = out_;
    const Element* const gradients = gradients_;
    const Encoder encoder(pending);
    NewMoments moments = MomentsOf(start, block, sums);
    NewMasters masters = {constants_};
    for (int64_t turn = 0; turn < kMomentBlockElements; turn += kTurn) {
      for (int64_t place = turn; place < turn + kTurn; place += kGroup) {
        const int64_t group = start + place;
        Prefetch(gradients + group);
        MasterOf<kMaster>::PrefetchAt(in, group);
        Prefetch(in.first_codes + group);
        Prefetch(in.second_codes + group);
        moments.Run(gradients + group, in, group, place);
        if constexpr (kHasPending) {
          masters.template Run<kStore>(pending.first + place, pending.roots + place, in, out,
                                       pending.start + place);
        }
      }
      if constexpr (kHasPending) {
        for (int64_t place = turn; place < turn + kTurn; place += kBytesStored) {
          encoder.template Encode<kStore>(place);
        }
      }
    }
    moments.sums.StoreTo(sums);
    if (kHasPending && masters.watch.Seen()) Canonicalize(pending);
    Finish(start, kMomentBlockElements, moments.largest, block, out.first_codes + start,
           out.second_codes + start);
  }

  /// Weights and codes of the last block.
  void Complete(const MomentBlock& pending) const {
    const Encoder encoder(pending);
    NewMasters masters = {constants_};
    for (int64_t place = 0; place < kMomentBlockElements; place += kGroup) {
      masters.template Run<kStore>(pending.first + place, pending.roots + place, in_, out_,
                                   pending.start + place);
    }
    for (int64_t place = 0; place < kMomentBlockElements; place += kBytesStored) {
      encoder.template Encode<kStore>(place);
    }
    if (masters.watch.Seen()) Canonicalize(pending);
  }

  void Canonicalize(const MomentBlock& block) const {
    CanonicalizeMasters<kMaster>(out_, block.start, block.start + kMomentBlockElements);
  }

  /// A block that the segment does not fill is coded aside: what follows the segment keeps its codes.
  void RunPart(int64_t start, int64_t stop, MomentBlock& block, float* sums) {
    NewMoments moments = MomentsOf(start, block, sums);
    NewMasters masters = {constants_};
    ForGroups(
        start, stop,
        [&](int64_t group) {
          const int64_t place = group - start;
          moments.Run(gradients_ + group, in_, group, place);
          masters.template Run<StoreKind::kOrdinary>(block.first + place, block.roots + place, in_, out_,
                                                     group);
        },
        [&](int64_t first, int64_t last, int64_t group) {
          GroupCopy<Element> copy;
          const AdamState state = copy.State();
          const int64_t place = group - start;
          CopyIn(gradients_, first, last, group, copy.gradients);
          CopyMasterIn<kMaster>(in_, first, last, group, state);
          CopyIn(in_.first_codes, first, last, group, copy.first_codes);
          CopyIn(in_.second_codes, first, last, group, copy.second_codes);
          moments.Run(copy.gradients, state, 0, place);
          masters.template Run<StoreKind::kOrdinary>(block.first + place, block.roots + place, state, state,
                                                     0);
          CopyMasterOut<kMaster>(state, first, last, group, out_);
        });
    moments.sums.StoreTo(sums);
    if (masters.watch.Seen()) CanonicalizeMasters<kMaster>(out_, start, stop);
    uint8_t first_codes[kMomentBlockElements], root_codes[kMomentBlockElements];
    Finish(start, stop - start, moments.largest, block, first_codes, root_codes);
    const Encoder encoder(block);
    for (int64_t place = 0; place < stop - start; place += kBytesStored) {
      encoder.template Encode<StoreKind::kOrdinary>(place);
    }
    CopyOut(first_codes, start, stop, start, out_.first_codes);
    CopyOut(root_codes, start, stop, start, out_.second_codes);
  }

  /// Chooses the scales, now that all new moments are known.
  void Finish(int64_t start, int64_t count, const Largest& largest, MomentBlock& block, uint8_t* first_codes,
              uint8_t* root_codes) const {
    block.start = start;
    block.first_scale = ScaleOf(largest.first, kSignedCode.top);
    block.root_scale = ScaleOf(largest.root, kUnsignedCode.top);
    // The codes keep the sign, also of a NaN.
    if (block.first_scale.scale != block.first_scale.scale) CanonicalizeMoments(block.first, 0, count);
    block.first_codes = first_codes;
    block.root_codes = root_codes;
    out_.first_scales[start / kMomentBlockElements] = block.first_scale.scale;
    out_.second_scales[start / kMomentBlockElements] = block.root_scale.scale;
  }

  const AdamScalars scalars_;
  const Constants constants_;
  const Floats gradient_scale_;
  const Element* const gradients_;
  const AdamState in_, out_;
};

template <GradientType kType, MasterKernel kMaster, StoreKind kStore>
void UpdateEightBitMoments(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                           const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                           float* block_sums) {
  EightBitUpdate<kType, kMaster, kStore>(scalars, gradients, gradient_scale, in, out)
      .Run(begin, end, block_sums);
}

}  // namespace
}  // namespace lohan
