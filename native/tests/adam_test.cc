// The kernels against a scalar reference written the long way, bit by bit.
#include "lohan/adam.h"

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "adam_kernels.h"
#include "check.h"

namespace lohan {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float Canonical(float value) { return std::isnan(value) ? FromBits(0x7FC00000) : value; }

uint16_t ToBfloat16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t bits = BitsOf(value);
  const uint32_t low = bits & 0xFFFF;
  uint32_t high = bits >> 16;
  if (low > 0x8000 || (low == 0x8000 && (high & 1) == 1)) ++high;
  return static_cast<uint16_t>(high);
}

struct Arrays {
  std::vector<float> gradients, master, first, second;
  std::vector<uint16_t> gradients16, weights;

  Arrays(int64_t length, uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < length; ++i) {
      gradients.push_back(normal(generator));
      gradients16.push_back(ToBfloat16(normal(generator)));
      master.push_back(normal(generator));
      first.push_back(0.1f * normal(generator));
      second.push_back(std::abs(0.01f * normal(generator)));
      weights.push_back(0x1234);
    }
  }

  AdamState State() { return {master.data(), first.data(), second.data(), weights.data()}; }
  GradientArray Float32() const {
    return {gradients.data(), GradientType::kFloat32, static_cast<int64_t>(gradients.size())};
  }
  GradientArray Bfloat16() const {
    return {gradients16.data(), GradientType::kBfloat16, static_cast<int64_t>(gradients16.size())};
  }
};

/// Bitwise: NaN equals itself, -0 does not equal 0.
template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

bool SameBits(const Arrays& a, const Arrays& b) {
  return SameBits(a.master, b.master) && SameBits(a.first, b.first) && SameBits(a.second, b.second) &&
         SameBits(a.weights, b.weights);
}

float GradientAt(const GradientArray& gradients, int64_t i, float scale) {
  if (gradients.type == GradientType::kFloat32) {
    return Canonical(static_cast<const float*>(gradients.data)[i] * scale);
  }
  return Canonical(FromBits(static_cast<uint32_t>(static_cast<const uint16_t*>(gradients.data)[i]) << 16) *
                   scale);
}

void ReferenceUpdate(const AdamSegment& s, const GradientArray& gradients, Arrays& arrays, float scale) {
  const double first_correction = 1.0 - std::pow(s.beta1, static_cast<double>(s.step));
  const double second_correction = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  for (int64_t k = s.offset; k < s.offset + s.length; ++k) {
    const auto i = static_cast<size_t>(k);
    const float g = GradientAt(gradients, k, scale);
    float p = arrays.master[i] * static_cast<float>(1.0 - s.learning_rate * s.weight_decay);
    const float m = arrays.first[i] + static_cast<float>(1.0 - s.beta1) * (g - arrays.first[i]);
    const float v =
        static_cast<float>(s.beta2) * arrays.second[i] + static_cast<float>(1.0 - s.beta2) * (g * g);
    const float denominator =
        std::sqrt(v) / static_cast<float>(std::sqrt(second_correction)) + static_cast<float>(s.epsilon);
    p = p - static_cast<float>(s.learning_rate / first_correction) * (m / denominator);
    arrays.master[i] = Canonical(p);
    arrays.first[i] = Canonical(m);
    arrays.second[i] = Canonical(v);
    arrays.weights[i] = ToBfloat16(arrays.master[i]);
  }
}

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
    double lanes[16] = {};
    for (size_t i = begin; i < std::min(begin + 2048, covered.size()); ++i) {
      lanes[i % 16] += static_cast<double>(covered[i]) * static_cast<double>(covered[i]);
      if (!std::isfinite(covered[i])) ++result.non_finite;
    }
    for (int half : {8, 4, 2, 1}) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
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

void CheckAgainstReference(const std::vector<AdamSegment>& segments, int64_t length, double scale,
                           bool bfloat16, ThreadPool& pool, const Arrays& start) {
  Arrays expected = start;
  const auto gradients_of = [&](const Arrays& arrays) {
    return bfloat16 ? arrays.Bfloat16() : arrays.Float32();
  };
  for (const AdamSegment& segment : segments) {
    ReferenceUpdate(segment, gradients_of(start), expected, static_cast<float>(scale));
  }
  const UpdateResult norm = ReferenceNorm(segments, gradients_of(start), static_cast<float>(scale));
  for (const InstructionSet set : AvailableInstructionSets()) {
    Arrays actual = start;
    const UpdateResult result = AdamwUpdate(segments, gradients_of(start), actual.State(), scale, pool, set);
    CHECK(SameBits(actual, expected));
    CHECK_EQUAL(result.non_finite, norm.non_finite);
    if (std::isnan(norm.squared_norm)) {
      CHECK(std::isnan(result.squared_norm));
    } else {
      CHECK_EQUAL(result.squared_norm, norm.squared_norm);
    }
    if (segments.size() == 1 && segments[0].length == length) {
      const UpdateResult alone = GradientNorm(gradients_of(start), scale, pool, set);
      CHECK(std::memcmp(&alone.squared_norm, &result.squared_norm, sizeof(double)) == 0);
      CHECK_EQUAL(alone.non_finite, result.non_finite);
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
      for (const bool bfloat16 : {false, true}) {
        CheckAgainstReference({Segment(0, length)}, length, 0.37, bfloat16, pool, start);
      }
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
  CheckAgainstReference(segments, length, 1.0, false, pool, start);
  CheckAgainstReference(segments, length, 1.0, true, pool, start);
}

TEST(TheNormDoesNotDependOnHowTheElementsAreCut) {
  ThreadPool pool(2);
  const int64_t length = 10000;
  const Arrays start(length, 6);
  const double whole = GradientNorm(start.Float32(), 1.0, pool, InstructionSet::kAuto).squared_norm;
  for (const int64_t cut : {1, 17, 2048, 5000, 9999}) {
    Arrays arrays = start;
    const std::vector<AdamSegment> segments = {Segment(cut, length - cut), Segment(0, cut)};
    CHECK_EQUAL(
        AdamwUpdate(segments, start.Float32(), arrays.State(), 1.0, pool, InstructionSet::kAuto).squared_norm,
        whole);
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
  }
  for (const double scale : {1.0, 3.0, 0.0}) {
    CheckAgainstReference({Segment(0, length, 1)}, length, scale, false, pool, start);
    CheckAgainstReference({Segment(0, length, 1)}, length, scale, true, pool, start);
  }
}

TEST(BfloatRoundingOfEveryUpperHalfAroundItsTie) {
  ThreadPool pool(1);
  for (const InstructionSet set : AvailableInstructionSets()) {
    for (const uint32_t low : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      Arrays arrays(0x10000, 1);
      for (uint32_t high = 0; high < 0x10000; ++high) arrays.master[high] = FromBits(high << 16 | low);
      const std::vector<float> before = arrays.master;
      // With no gradient, moments or learning rate p * 1 - 0 leaves the master as it is: only the rounding is
      // seen.
      for (auto* zeros : {&arrays.gradients, &arrays.first, &arrays.second}) zeros->assign(0x10000, 0.0f);
      const AdamSegment still{0, 0x10000, 0.0, 0.9, 0.999, 1e-8, 0.0, 1};
      AdamwUpdate(std::vector{still}, arrays.Float32(), arrays.State(), 1.0, pool, set);
      for (size_t i = 0; i < before.size(); ++i) CHECK_EQUAL(arrays.weights[i], ToBfloat16(before[i]));
    }
  }
}

TEST(ResultsDoNotDependOnTheCallersFloatMode) {
  const Arrays start(5000, 8);
  Arrays expected = start;
  ThreadPool plain(1);
  AdamwUpdate(std::vector{Segment(0, 5000)}, start.Float32(), expected.State(), 1e-40, plain,
              InstructionSet::kAuto);
  std::fesetround(FE_UPWARD);
  Arrays actual = start;
  {
    ThreadPool inherits(2);
    AdamwUpdate(std::vector{Segment(0, 5000)}, start.Float32(), actual.State(), 1e-40, inherits,
                InstructionSet::kAuto);
  }
  std::fesetround(FE_TONEAREST);
  CHECK(SameBits(actual, expected));
}

TEST(BadSegmentsAreRefusedBeforeAnythingChanges) {
  ThreadPool pool(1);
  const Arrays start(100, 9);
  Arrays arrays = start;
  const auto update = [&](std::vector<AdamSegment> segments, double scale = 1.0) {
    AdamwUpdate(segments, start.Float32(), arrays.State(), scale, pool, InstructionSet::kAuto);
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

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
