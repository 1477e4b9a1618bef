// The kernels against a scalar reference written the long way, bit by bit.
#include "lohan/adam.h"

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "adam_reference.h"
#include "check.h"

namespace lohan {
namespace {

using namespace test;

/// The documented tree, summed the long way over gradients that are zero outside the segments.
UpdateResult ReferenceNorm(const std::vector<AdamSegment>& segments, const GradientArray& gradients,
                           float scale) {
  std::vector<float> covered(static_cast<size_t>(gradients.length));
  for (const AdamSegment& s : segments) {
    for (int64_t i = s.offset; i < s.offset + s.length; ++i) {
      covered[static_cast<size_t>(i)] = GradientAt(gradients, i, scale);
    }
  }
  UpdateResult result;
  std::vector<double> sums;
  for (size_t begin = 0; begin < covered.size(); begin += 2048) {
    const size_t end = std::min(begin + 2048, covered.size());
    double lanes[16] = {};
    for (size_t part = begin; part < end; part += 256) {
      float squares[16] = {};
      for (size_t i = part; i < std::min(part + 256, end); ++i) squares[i % 16] += covered[i] * covered[i];
      for (size_t lane = 0; lane < 16; ++lane) lanes[lane] += static_cast<double>(squares[lane]);
    }
    for (int half : {8, 4, 2, 1}) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    if (!std::isfinite(lanes[0])) {
      lanes[0] = 0.0;
      for (size_t i = begin; i < end; ++i)
        lanes[0] += static_cast<double>(covered[i]) * static_cast<double>(covered[i]);
    }
    for (size_t i = begin; i < end; ++i) result.non_finite += !std::isfinite(covered[i]);
    sums.push_back(lanes[0]);
  }
  while (sums.size() > 1) {
    std::vector<double> pairs;
    for (size_t i = 0; i + 1 < sums.size(); i += 2) pairs.push_back(sums[i] + sums[i + 1]);
    if (sums.size() % 2 == 1) pairs.push_back(sums.back());
    sums = pairs;
  }
  if (!sums.empty()) result.squared_norm = sums[0];
  return result;
}

struct Form {
  Master master;
  Moments moments;
};

constexpr Form kForms[] = {
    {Master::kFloat32, Moments::kFloat32}, {Master::kFloat32WithWeights, Moments::kFloat32},
    {Master::kSplit, Moments::kFloat32},   {Master::kFloat32, Moments::kEightBit},
    {Master::kSplit, Moments::kEightBit},  {Master::kFloat32WithWeights, Moments::kEightBit}};

bool SameNorm(const UpdateResult& a, const UpdateResult& b) {
  const bool both_nan = std::isnan(a.squared_norm) && std::isnan(b.squared_norm);
  return (both_nan || a.squared_norm == b.squared_norm) && a.non_finite == b.non_finite;
}

/// Out of place where one array does not begin at a cache line, which takes streaming stores off all of them.
void CheckOffLines(const Form& form, const std::vector<AdamSegment>& segments, double scale,
                   GradientType type, ThreadPool& pool, const Arrays& start, const Arrays& expected,
                   InstructionSet set) {
  Arrays old = start, fresh = start;
  AdamState out = fresh.State(form.master, form.moments);
  const auto move = [](auto& array, auto*& pointer) {
    array.insert(array.begin(), 1, {});
    pointer = array.data() + 1;
  };
  if (form.moments == Moments::kEightBit) {
    move(fresh.first_codes, out.first_codes);
  } else {
    move(fresh.second, out.second_moment);
  }
  AdamwUpdate(segments, start.Gradients(type), old.State(form.master, form.moments), out, scale, pool, set);
  if (form.moments == Moments::kEightBit) {
    fresh.first_codes.erase(fresh.first_codes.begin());
  } else {
    fresh.second.erase(fresh.second.begin());
  }
  CHECK(SameBits(fresh, expected));
}

void CheckAgainstReference(const Form& form, const std::vector<AdamSegment>& segments, int64_t length,
                           double scale, GradientType type, ThreadPool& pool, const Arrays& start) {
  Arrays expected = start;
  for (const AdamSegment& segment : segments) {
    Reference(segment, start.Gradients(type), expected, static_cast<float>(scale), form.master, form.moments)
        .Run();
  }
  const UpdateResult norm = ReferenceNorm(segments, start.Gradients(type), static_cast<float>(scale));
  for (const InstructionSet set : AvailableInstructionSets()) {
    Arrays in_place = start;
    const AdamState state = in_place.State(form.master, form.moments);
    CHECK(SameNorm(AdamwUpdate(segments, start.Gradients(type), state, state, scale, pool, set), norm));
    CHECK(SameBits(in_place, expected));
    // Out of place: the old state stays, and the new one holds what it held outside the segments.
    Arrays old = start, fresh = start;
    CHECK(SameNorm(AdamwUpdate(segments, start.Gradients(type), old.State(form.master, form.moments),
                               fresh.State(form.master, form.moments), scale, pool, set),
                   norm));
    CHECK(SameBits(old, start));
    CHECK(SameBits(fresh, expected));
    CheckOffLines(form, segments, scale, type, pool, start, expected, set);
    if (segments.size() == 1 && segments[0].length == length) {
      CHECK(SameNorm(GradientNorm(start.Gradients(type), scale, pool, set), norm));
    }
  }
}

void CheckEveryForm(const std::vector<AdamSegment>& segments, int64_t length, double scale, ThreadPool& pool,
                    const Arrays& start) {
  for (const Form& form : kForms) {
    for (const GradientType type : {GradientType::kFloat32, GradientType::kBfloat16}) {
      CheckAgainstReference(form, segments, length, scale, type, pool, start);
    }
  }
}

AdamSegment Segment(int64_t offset, int64_t length, int64_t step = 3) {
  return {offset, length, 1e-2, 0.9, 0.999, 1e-8, 0.1, step};
}

TEST(EveryLengthAroundVectorBlockAndTaskWidths) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (const int64_t length : {0,
                                 1,
                                 3,
                                 4,
                                 7,
                                 8,
                                 9,
                                 15,
                                 16,
                                 17,
                                 31,
                                 33,
                                 100,
                                 255,
                                 256,
                                 257,
                                 300,
                                 2047,
                                 2048,
                                 2049,
                                 4095,
                                 4096,
                                 4097,
                                 2048 * 16 - 1,
                                 2048 * 16,
                                 2048 * 16 + 1,
                                 2048 * 35 + 5}) {
      const Arrays start(length, static_cast<uint32_t>(length));
      CheckEveryForm({Segment(0, length)}, length, 0.37, pool, start);
    }
  }
}

TEST(SegmentsKeepTheirOwnStepAndLeaveTheRestAlone) {
  ThreadPool pool(2);
  const int64_t length = 3 * 2048 + 11;
  const Arrays start(length, 5);
  const std::vector<AdamSegment> segments = {{4100, 1, 1e-3, 0.8, 0.95, 1e-6, 0.0, 1},
                                             Segment(0, 1, 1),
                                             Segment(5, 2040, 2),
                                             Segment(2045, 7, 1000000),
                                             {2100, 2000, 0.0, 0.0, 0.0, 0.0, 0.0, 1},
                                             Segment(4101, 0),
                                             Segment(length - 3, 3, 7)};
  for (const Form& form : kForms) {
    if (form.moments == Moments::kEightBit) continue;  // these segments share blocks
    CheckAgainstReference(form, segments, length, 1.0, GradientType::kFloat32, pool, start);
    CheckAgainstReference(form, segments, length, 1.0, GradientType::kBfloat16, pool, start);
  }
}

TEST(SegmentsThatOwnTheirBlocks) {
  ThreadPool pool(2);
  const int64_t length = 5 * 2048 + 300;
  const Arrays start(length, 15);
  CheckEveryForm({Segment(2048, 256, 4),
                  Segment(0, 100, 1),
                  {256, 1500, 1e-3, 0.8, 0.95, 1e-6, 0.0, 9},
                  Segment(2304, 7900),
                  Segment(length - length % 256, length % 256, 7)},
                 length, 1.0, pool, start);
}

TEST(TheNormDoesNotDependOnHowTheElementsAreCut) {
  ThreadPool pool(2);
  const int64_t length = 10000;
  const Arrays start(length, 6);
  const double whole = GradientNorm(start.Float32(), 1.0, pool, InstructionSet::kAuto).squared_norm;
  for (const int64_t cut : {1, 17, 2048, 5000, 9999}) {
    Arrays arrays = start;
    const AdamState state = arrays.State(Master::kFloat32, Moments::kFloat32);
    const std::vector<AdamSegment> segments = {Segment(cut, length - cut), Segment(0, cut)};
    CHECK_EQUAL(
        AdamwUpdate(segments, start.Float32(), state, state, 1.0, pool, InstructionSet::kAuto).squared_norm,
        whole);
  }
}

TEST(SquaresBeyondTheRangeOfFp32AreSummedInDouble) {
  ThreadPool pool(2);
  Arrays start(5000, 16);
  start.gradients[1000] = 3e38f;
  start.gradients[1001] = -2e19f;
  for (const InstructionSet set : AvailableInstructionSets()) {
    const UpdateResult norm = GradientNorm(start.Float32(), 1.0, pool, set);
    CHECK_EQUAL(norm.non_finite, 0);
    CHECK(SameNorm(norm, ReferenceNorm({Segment(0, 5000)}, start.Float32(), 1.0f)));
    CHECK(std::isfinite(norm.squared_norm));
    CHECK(norm.squared_norm >= 8.99e76);
  }
}

TEST(SpecialValues) {
  ThreadPool pool(1);
  const std::vector<float> specials = {0.0f,
                                       -0.0f,
                                       kInfinity,
                                       -kInfinity,
                                       kNan,
                                       FromBits(0xFFC00001u),
                                       FromBits(0x7F800001u),
                                       std::numeric_limits<float>::max(),
                                       -std::numeric_limits<float>::max(),
                                       std::numeric_limits<float>::denorm_min(),
                                       std::numeric_limits<float>::min(),
                                       1.0f,
                                       FromBits(0x3F808000u),
                                       FromBits(0x3F818000u),
                                       FromBits(0x3F807FFFu),
                                       FromBits(0x7F7F8000u)};
  const auto count = static_cast<int64_t>(specials.size());
  const int64_t length = count * count * 3;
  Arrays start(length, 7);
  for (int64_t i = 0; i < count * count; ++i) {
    const float a = specials[static_cast<size_t>(i % count)];
    const float b = specials[static_cast<size_t>(i / count)];
    const auto at = static_cast<size_t>(3 * i);
    start.gradients[at] = a;
    start.gradients16[at] = static_cast<uint16_t>(BitsOf(a) >> 16);
    start.master[at] = b;
    start.gradients[at + 1] = a;
    start.first[at + 1] = b;
    start.gradients[at + 2] = a;
    start.second[at + 2] = b;
    SplitOf(b, start.weights[at], start.remainder[at]);
  }
  // Scales that make a block zero, infinite and NaN.
  start.first_scales[0] = 0.0f;
  start.first_scales[1] = kNan;
  start.second_scales[2] = kInfinity;
  for (const double scale : {1.0, 3.0, 0.0}) {
    CheckEveryForm({Segment(0, length, 1)}, length, scale, pool, start);
  }
}

TEST(BfloatRoundingOfEveryUpperHalfAroundItsTie) {
  ThreadPool pool(1);
  for (const InstructionSet set : AvailableInstructionSets()) {
    for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      Arrays arrays(0x10000, 1);
      for (uint32_t high = 0; high < 0x10000; ++high) arrays.master[high] = FromBits(high << 16 | low);
      const Lines<float> before = arrays.master;
      // With no gradient, moments or learning rate p * 1 - 0 leaves the master as it is: only the rounding is
      // seen.
      for (auto* zeros : {&arrays.gradients, &arrays.first, &arrays.second}) zeros->assign(0x10000, 0.0f);
      const AdamSegment still{0, 0x10000, 0.0, 0.9, 0.999, 1e-8, 0.0, 1};
      const AdamState state = arrays.State(Master::kFloat32WithWeights, Moments::kFloat32);
      AdamwUpdate(std::vector{still}, arrays.Float32(), state, state, 1.0, pool, set);
      for (size_t i = 0; i < before.size(); ++i) CHECK_EQUAL(arrays.weights[i], ToBfloat16(before[i]));
    }
  }
}

TEST(ResultsDoNotDependOnTheCallersFloatMode) {
  const Arrays start(5000, 8);
  for (const Form& form : kForms) {
    const auto update = [&](Arrays& arrays, ThreadPool& pool) {
      const AdamState state = arrays.State(form.master, form.moments);
      AdamwUpdate(std::vector{Segment(0, 5000)}, start.Float32(), state, state, 1e-40, pool,
                  InstructionSet::kAuto);
    };
    Arrays expected = start;
    ThreadPool plain(1);
    update(expected, plain);
    std::fesetround(FE_UPWARD);
    Arrays actual = start;
    {
      ThreadPool inherits(2);
      update(actual, inherits);
    }
    std::fesetround(FE_TONEAREST);
    CHECK(SameBits(actual, expected));
  }
}

TEST(BadSegmentsAreRefusedBeforeAnythingChanges) {
  ThreadPool pool(1);
  const Arrays start(100, 9);
  Arrays arrays = start;
  const auto update = [&](std::vector<AdamSegment> segments, double scale = 1.0) {
    const AdamState state = arrays.State(Master::kFloat32, Moments::kFloat32);
    AdamwUpdate(segments, start.Float32(), state, state, scale, pool, InstructionSet::kAuto);
  };
  CHECK_THROWS(std::invalid_argument, "offset is -1", update({Segment(-1, 5)}));
  CHECK_THROWS(std::invalid_argument, "length is -5", update({Segment(0, -5)}));
  CHECK_THROWS(std::invalid_argument, "ends beyond", update({Segment(96, 5)}));
  CHECK_THROWS(std::invalid_argument, "ends beyond",
               update({Segment(1, std::numeric_limits<int64_t>::max())}));
  CHECK_THROWS(std::invalid_argument, "overlaps", update({Segment(0, 10), Segment(9, 5)}));
  CHECK_THROWS(std::invalid_argument, "step is 0", update({Segment(0, 10, 0)}));
  CHECK_THROWS(std::invalid_argument, "beta1", update({{0, 10, 1e-3, 1.0, 0.999, 1e-8, 0.0, 1}}));
  CHECK_THROWS(std::invalid_argument, "beta2", update({{0, 10, 1e-3, 0.9, -0.1, 1e-8, 0.0, 1}}));
  CHECK_THROWS(std::invalid_argument, "learning_rate", update({{0, 10, kNan, 0.9, 0.999, 1e-8, 0.0, 1}}));
  CHECK_THROWS(std::invalid_argument, "epsilon", update({{0, 10, 1e-3, 0.9, 0.999, -1.0, 0.0, 1}}));
  CHECK_THROWS(std::invalid_argument, "weight_decay",
               update({{0, 10, 1e-3, 0.9, 0.999, 1e-8, kInfinity, 1}}));
  CHECK_THROWS(std::invalid_argument, "gradient_scale", update({Segment(0, 10)}, kNan));
  CHECK_THROWS(std::invalid_argument, "gradient_scale", update({Segment(0, 10)}, 1e300));
  CHECK(SameBits(arrays, start));
}

TEST(ArraysThatMakeNoStateAreRefused) {
  ThreadPool pool(1);
  Arrays arrays(600, 10);
  const auto update = [&](const AdamState& in, const AdamState& out, std::vector<AdamSegment> segments = {}) {
    AdamwUpdate(segments, arrays.Float32(), in, out, 1.0, pool, InstructionSet::kAuto);
  };
  const AdamState whole = arrays.State(Master::kFloat32, Moments::kFloat32);
  const AdamState split = arrays.State(Master::kSplit, Moments::kFloat32);
  const AdamState coded = arrays.State(Master::kFloat32, Moments::kEightBit);
  CHECK_THROWS(std::invalid_argument, "form of their master", update(whole, split));
  CHECK_THROWS(std::invalid_argument, "form of their moments", update(whole, coded));
  AdamState bad = split;
  bad.remainder = nullptr;
  CHECK_THROWS(std::invalid_argument, "weights and remainder", update(bad, bad));
  bad = whole;
  bad.remainder = arrays.remainder.data();
  CHECK_THROWS(std::invalid_argument, "not both", update(bad, bad));
  bad = whole;
  bad.second_moment = nullptr;
  CHECK_THROWS(std::invalid_argument, "both moments", update(bad, bad));
  bad = coded;
  bad.second_scales = nullptr;
  CHECK_THROWS(std::invalid_argument, "scales", update(bad, bad));
  CHECK_THROWS(std::invalid_argument, "multiple of 256", update(coded, coded, {Segment(1, 5)}));
  CHECK_THROWS(std::invalid_argument, "past the last block",
               update(coded, coded, {Segment(0, 256), Segment(256, 10), Segment(512, 2), Segment(300, 5)}));
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
