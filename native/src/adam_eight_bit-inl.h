// The update of states with 8-bit moments. Part of adam-inl.h.

#pragma once

#include "adam_step-inl.h"
#include "moment_code-inl.h"

namespace lohan {
namespace {

/// The largest magnitudes seen of both moments, by lane.
struct Largest {
  Ints first = {}, root = {};
};

/// One block's new moments on their way to codes. The codes of one block are made in the same loop as the
/// next block's update: the update waits for square roots and quotients, and coding needs neither.
struct MomentBlock {
  alignas(64) float first[kMomentBlockElements];
  alignas(64) float roots[kMomentBlockElements];
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

  void EncodeGroup(int64_t place) const {
    Ints first[kGroup / kLanes], roots[kGroup / kLanes];
    for (int vector = 0; vector < kGroup / kLanes; ++vector) {
      first[vector] = EncodeFirst(Load<Floats>(first_ + place + vector * kLanes), first_inverse_);
      roots[vector] = EncodeRoot(Load<Floats>(roots_ + place + vector * kLanes), root_inverse_);
    }
    StoreLowestBytes(first, first_codes_ + place);
    StoreLowestBytes(roots, root_codes_ + place);
  }

 private:
  const float* const first_;
  const float* const roots_;
  uint8_t* const first_codes_;
  uint8_t* const root_codes_;
  const Floats first_inverse_, root_inverse_;
};

template <GradientType kType, MasterKernel kMaster>
class EightBitUpdate {
  using Gradient = GradientOf<kType>;
  using Element = typename Gradient::Element;

 public:
  EightBitUpdate(const AdamScalars& scalars, const void* gradients, float gradient_scale, const AdamState& in,
                 const AdamState& out)
      : constants_(scalars),
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
    if (pending != nullptr) EncodeAll(*pending, kMomentBlockElements);
  }

 private:
  static_assert(kNormPartElements == kMomentBlockElements);

  /// The arithmetic of one group, with all that it needs in registers.
  struct GroupUpdate {
    const Constants constants;
    const Floats gradient_scale;
    const Floats first_decay;   // beta1 times the first moment's scale
    const Floats second_decay;  // beta2 times the square of the root's scale
    float* const first;
    float* const roots;
    Sums sums;
    NanWatch watch = {};
    Largest largest = {};

    Floats Advance(const Element* gradients, const AdamState& in, int64_t i, int64_t place, int vector) {
      const Floats gradient = Gradient::LoadFrom(gradients) * gradient_scale;
      const Floats square = gradient * gradient;
      sums.Add(square, vector);
      const Floats old_root = DecodeRoot(in.second_codes + i);
      const Floats root = SquareRoot(old_root * old_root * second_decay + constants.second_weight * square);
      const Floats new_first =
          DecodeFirst(in.first_codes + i) * first_decay + constants.first_weight * gradient;
      const Floats master = Step(constants, MasterOf<kMaster>::LoadFrom(in, i), new_first, root);
      watch.Add(master);
      Store(new_first, first + place);
      Store(root, roots + place);
      largest.first = LargerMagnitude(largest.first, new_first);
      largest.root = Larger(largest.root, __builtin_bit_cast(Ints, root));  // 0 or more, or the watch sees it
      return master;
    }

    void Run(const Element* gradients, const AdamState& in, const AdamState& out, int64_t group,
             int64_t place) {
      for (int vector = 0; vector < kGroup / kLanes; vector += 2) {
        const int64_t i = group + vector * kLanes, at = place + vector * kLanes;
        const Element* source = gradients + vector * kLanes;
        const Floats a = Advance(source, in, i, at, vector);
        const Floats b = Advance(source + kLanes, in, i + kLanes, at + kLanes, vector + 1);
        MasterOf<kMaster>::StoreTo(a, b, out, i);
      }
    }
  };

  GroupUpdate UpdateOf(int64_t start, MomentBlock& block, const float* sums) const {
    const float first_scale = in_.first_scales[start / kMomentBlockElements];
    const float root_scale = in_.second_scales[start / kMomentBlockElements];
    return {constants_,
            gradient_scale_,
            constants_.beta1 * first_scale,
            constants_.beta2 * (root_scale * root_scale),
            block.first,
            block.roots,
            Sums(sums)};
  }

  template <bool kHasPending>
  void RunWhole(int64_t start, MomentBlock& block, const MomentBlock& pending, float* sums) {
    const AdamState in = in_, out = out_;
    const Element* const gradients = gradients_;
    const Encoder encoder(pending);
    GroupUpdate update = UpdateOf(start, block, sums);
    for (int64_t place = 0; place < kMomentBlockElements; place += kGroup) {
      const int64_t group = start + place;
      Prefetch(gradients + group);
      if constexpr (kMaster != kSplitMaster) Prefetch(in.master + group);
      if constexpr (kMaster == kSplitMaster) Prefetch(in.weights + group);
      if constexpr (kMaster == kSplitMaster) Prefetch(in.remainder + group);
      Prefetch(in.first_codes + group);
      Prefetch(in.second_codes + group);
      update.Run(gradients + group, in, out, group, place);
      if constexpr (kHasPending) encoder.EncodeGroup(place);
    }
    update.sums.StoreTo(sums);
    Finish(start, start + kMomentBlockElements, update, block, out.first_codes + start,
           out.second_codes + start);
  }

  /// A block that the segment does not fill is coded aside: what follows the segment keeps its codes.
  void RunPart(int64_t start, int64_t stop, MomentBlock& block, float* sums) {
    GroupUpdate update = UpdateOf(start, block, sums);
    ForGroups(
        start, stop, [&](int64_t group) { update.Run(gradients_ + group, in_, out_, group, group - start); },
        [&](int64_t first, int64_t last, int64_t group) {
          GroupCopy<Element> copy;
          const AdamState state = copy.State();
          CopyIn(gradients_, first, last, group, copy.gradients);
          CopyMasterIn<kMaster>(in_, first, last, group, state);
          CopyIn(in_.first_codes, first, last, group, copy.first_codes);
          CopyIn(in_.second_codes, first, last, group, copy.second_codes);
          update.Run(copy.gradients, state, state, 0, group - start);
          CopyMasterOut<kMaster>(state, first, last, group, out_);
        });
    update.sums.StoreTo(sums);
    uint8_t first_codes[kMomentBlockElements], root_codes[kMomentBlockElements];
    Finish(start, stop, update, block, first_codes, root_codes);
    EncodeAll(block, stop - start);
    CopyOut(first_codes, start, stop, start, out_.first_codes);
    CopyOut(root_codes, start, stop, start, out_.second_codes);
  }

  /// Chooses the scales, now that all new moments are known.
  void Finish(int64_t start, int64_t stop, const GroupUpdate& update, MomentBlock& block,
              uint8_t* first_codes, uint8_t* root_codes) const {
    Largest largest = update.largest;
    if (update.watch.Seen()) {
      CanonicalizeMasters<kMaster>(out_, start, stop);
      CanonicalizeMoments(block.first, 0, stop - start);
      CanonicalizeMoments(block.roots, 0, stop - start);
      for (int64_t i = 0; i < stop - start; ++i) {
        largest.root = LargerMagnitude(largest.root, Broadcast(block.roots[i]));
      }
    }
    block.first_scale = ScaleOf(largest.first, kSignedCode.top);
    block.root_scale = ScaleOf(largest.root, kUnsignedCode.top);
    block.first_codes = first_codes;
    block.root_codes = root_codes;
    out_.first_scales[start / kMomentBlockElements] = block.first_scale.scale;
    out_.second_scales[start / kMomentBlockElements] = block.root_scale.scale;
  }

  static void EncodeAll(const MomentBlock& block, int64_t count) {
    const Encoder encoder(block);
    for (int64_t place = 0; place < count; place += kGroup) encoder.EncodeGroup(place);
  }

  const Constants constants_;
  const Floats gradient_scale_;
  const Element* const gradients_;
  const AdamState in_, out_;
};

template <GradientType kType, MasterKernel kMaster>
void UpdateEightBitMoments(const AdamScalars& scalars, const void* gradients, float gradient_scale,
                           const AdamState& in, const AdamState& out, int64_t begin, int64_t end,
                           float* block_sums) {
  EightBitUpdate<kType, kMaster>(scalars, gradients, gradient_scale, in, out).Run(begin, end, block_sums);
}

}  // namespace
}  // namespace lohan
