// The split master and the 8-bit code by themselves: nothing lost where nothing may be, and the stated error
// elsewhere.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "adam_reference.h"
#include "check.h"

namespace lohan {
namespace {

using namespace test;

/// Values around every bfloat16: itself, its neighbours in fp32, and those around both ties.
std::vector<float> ValuesAround(uint32_t first_high, uint32_t last_high) {
  std::vector<float> values;
  for (uint32_t high = first_high; high < last_high; ++high) {
    for (const uint32_t low : {0u, 1u, 2u, 0x7FFEu, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFEu, 0xFFFFu}) {
      values.push_back(FromBits(high << 16 | low));
    }
  }
  return values;
}

void CheckSplit(const std::vector<float>& values, ThreadPool& pool) {
  const auto length = static_cast<int64_t>(values.size());
  for (const InstructionSet set : AvailableInstructionSets()) {
    std::vector<uint16_t> weights(values.size());
    std::vector<int16_t> remainder(values.size());
    std::vector<float> joined(values.size());
    SplitMaster(values.data(), weights.data(), remainder.data(), length, pool, set);
    JoinMaster(weights.data(), remainder.data(), joined.data(), length, pool, set);
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t expected_weights;
      int16_t expected_remainder;
      SplitOf(values[i], expected_weights, expected_remainder);
      CHECK_EQUAL(weights[i], expected_weights);
      CHECK_EQUAL(remainder[i], expected_remainder);
      CHECK_EQUAL(BitsOf(joined[i]), BitsOf(Canonical(values[i])));
    }
  }
}

TEST(TheSplitLosesNothingAroundEveryBfloat16) {
  ThreadPool pool(2);
  for (uint32_t high = 0; high < 0x10000; high += 0x2000) CheckSplit(ValuesAround(high, high + 0x2000), pool);
}

TEST(TheSplitLosesNothingOfRandomBitsAndSpecialValues) {
  ThreadPool pool(2);
  std::mt19937 generator(3);
  std::vector<float> values = {kInfinity,
                               -kInfinity,
                               kNan,
                               -kNan,
                               FromBits(0x7FFFFFFF),
                               FromBits(0xFFFFFFFF),
                               0.0f,
                               -0.0f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::lowest(),
                               std::numeric_limits<float>::denorm_min()};
  for (int i = 0; i < 1000000; ++i) values.push_back(FromBits(static_cast<uint32_t>(generator())));
  CheckSplit(values, pool);
}

TEST(SplitWeightsOfNanAreNanAndOfTheLargestNumberInfinite) {
  ThreadPool pool(1);
  const std::vector<float> values = {FromBits(0x7FFFFFFF), std::numeric_limits<float>::max()};
  std::vector<uint16_t> weights(2);
  std::vector<int16_t> remainder(2);
  SplitMaster(values.data(), weights.data(), remainder.data(), 2, pool, InstructionSet::kAuto);
  CHECK_EQUAL(weights[0], 0x7FC0);
  CHECK_EQUAL(remainder[0], 0);
  CHECK_EQUAL(weights[1], 0x7F80);
  CHECK_EQUAL(remainder[1], -1);
}

TEST(EveryCodeMeansAValueThatIsCodedAsItself) {
  for (const DynamicCode* code : {&kSignedCode, &kUnsignedCode}) {
    const int end = 1 << code->levels;
    CHECK_EQUAL(BitsOf(DecodeMagnitude(*code, 0, 1.0f)), 0u);
    for (int number = 0; number < end; ++number) {
      CHECK_EQUAL(EncodeMagnitude(*code, DecodeMagnitude(*code, number, 1.0f)), number);
      if (number > 0) CHECK(DecodeMagnitude(*code, number, 1.0f) > DecodeMagnitude(*code, number - 1, 1.0f));
    }
    // One rounding each of offset, product and sum.
    CHECK(std::abs(DecodeMagnitude(*code, end - 1, 1.0f) - code->top) <= 3.0f * std::ldexp(1.0f, -24));
    CHECK(code->top < 1.0f);
  }
}

TEST(ACodeIsWithinHalfACellOfItsValue) {
  // Half a cell of level i is 7/16 of its end over its cells, 2^i. Up to two fp32 roundings of values up to 1
  // add 2^-23. The two lowest levels have one or two codes each, which may be off by half of the level's end.
  for (const DynamicCode* code : {&kSignedCode, &kUnsignedCode}) {
    for (double value = 0.0; value <= static_cast<double>(code->top); value += 1.7e-5) {
      const int number = EncodeMagnitude(*code, static_cast<float>(value));
      int level = 0;
      while (value >= std::ldexp(1.0, 3 * (level + 1 - code->levels))) ++level;
      const double end = std::ldexp(1.0, 3 * (level + 1 - code->levels));
      const double half_cell = level < 2 ? 0.5 * end : 7.0 / 16.0 * std::ldexp(end, -level);
      CHECK(std::abs(static_cast<double>(DecodeMagnitude(*code, number, 1.0f)) - value) <=
            half_cell + std::ldexp(1.0, -23));
    }
  }
}

TEST(DecodedMomentsAreTheCodesValues) {
  ThreadPool pool(2);
  for (const int64_t length : {1, 15, 256, 257, 1000}) {
    const Arrays arrays(length, 21);
    for (const InstructionSet set : AvailableInstructionSets()) {
      std::vector<float> moments(static_cast<size_t>(length));
      DecodeMoment(MomentCode::kFirst, arrays.first_codes.data(), arrays.first_scales.data(), moments.data(),
                   length, pool, set);
      for (size_t i = 0; i < moments.size(); ++i) {
        CHECK_EQUAL(BitsOf(moments[i]),
                    BitsOf(DecodeFirst(arrays.first_codes[i], arrays.first_scales[i / 256])));
      }
      DecodeMoment(MomentCode::kSecond, arrays.second_codes.data(), arrays.second_scales.data(),
                   moments.data(), length, pool, set);
      for (size_t i = 0; i < moments.size(); ++i) {
        const float root =
            DecodeMagnitude(kUnsignedCode, arrays.second_codes[i], arrays.second_scales[i / 256]);
        CHECK_EQUAL(BitsOf(moments[i]), BitsOf(root * root));
      }
    }
  }
}

TEST(ZeroBitsAreZeroMomentsAndALargestValueIsExact) {
  ThreadPool pool(1);
  Arrays arrays(256, 30);
  for (auto* codes : {&arrays.first_codes, &arrays.second_codes}) codes->assign(256, 0);
  for (auto* scales : {&arrays.first_scales, &arrays.second_scales}) scales->assign(1, 0.0f);
  for (float& gradient : arrays.gradients) gradient *= 1e-3f;
  arrays.gradients[7] = -0.5f;
  const AdamState state = arrays.State(Master::kFloat32, Moments::kEightBit);
  const AdamSegment segment = {0, 256, 1e-3, 0.5, 0.75, 1e-8, 0.0, 1};
  AdamwUpdate(std::vector{segment}, arrays.Float32(), state, state, 1.0, pool, InstructionSet::kAuto);
  std::vector<float> first(256), second(256);
  DecodeMoment(MomentCode::kFirst, state.first_codes, state.first_scales, first.data(), 256, pool,
               InstructionSet::kAuto);
  DecodeMoment(MomentCode::kSecond, state.second_codes, state.second_scales, second.data(), 256, pool,
               InstructionSet::kAuto);
  // (1 - 0.5) * -0.5 and (1 - 0.75) * 0.25; the scale's division and the code's product round once each.
  const float rounding = 2.0f * std::ldexp(1.0f, -23);
  CHECK(std::abs(first[7] + 0.25f) <= 0.25f * rounding);
  CHECK(std::abs(second[7] - 0.0625f) <= 0.0625f * 2.0f * rounding);
}

TEST(ReadModifyWriteAddsTheSourceToAllThree) {
  ThreadPool pool(3);
  for (const int64_t length : {0, 1, 17, 100000}) {
    const Arrays start(length, 31);
    for (const InstructionSet set : AvailableInstructionSets()) {
      Arrays arrays = start;
      ReadModifyWrite(arrays.master.data(), arrays.first.data(), arrays.second.data(),
                      arrays.gradients.data(), length, pool, set);
      for (size_t i = 0; i < arrays.master.size(); ++i) {
        CHECK_EQUAL(arrays.master[i], start.master[i] + start.gradients[i]);
        CHECK_EQUAL(arrays.first[i], start.first[i] + start.gradients[i]);
        CHECK_EQUAL(arrays.second[i], start.second[i] + start.gradients[i]);
      }
    }
  }
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
