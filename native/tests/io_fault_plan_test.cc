// What every engine must do alike when operations fail, are short, are interrupted or change bits.
#include <array>
#include <cerrno>
#include <cmath>
#include <map>
#include <span>

#include "io_fixture.h"

namespace lohan {
namespace {

using test::Contents;
using test::EngineMaker;
using test::Folder;
using test::NewPlan;
using test::Pattern;
using test::Start;

constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kPage = 4096;

void RoundTrip(EngineMaker make, std::shared_ptr<FaultPlan> plan) {
  Folder folder;
  const int64_t size = 5 * kMib + 777;
  auto file = File::Open(folder.File("data"), size);
  auto engine = make(3, std::move(plan));
  std::vector<std::byte> source = Pattern(size, 11);
  for (const int64_t shift : {0, 1}) {  // as O_DIRECT takes it, and by way of bounce buffers
    AlignedBuffer memory(size + shift);
    std::byte* const at = memory.data() + shift;
    std::copy(source.begin(), source.end(), at);
    Start(*engine, file, Access::kWrite, 0, at, size)->Wait();
    CHECK(Contents(folder.File("data")) == source);
    std::memset(at, 0, static_cast<size_t>(size));
    Start(*engine, file, Access::kRead, 3, at + 3, size - 3)->Wait();
    CHECK(std::equal(source.begin() + 3, source.end(), at + 3));
  }
}

TEST_EACH_ENGINE(InterruptedAndRefusedCallsAreRepeated) {
  auto plan = NewPlan();
  for (int64_t nth = 1; nth < 100; nth += 3)
    plan->Fail({.nth = nth, .count = 2}, nth % 2 == 0 ? EINTR : EAGAIN);
  RoundTrip(make, plan);
  CHECK(!plan->struck().empty());
}

TEST_EACH_ENGINE(ShortCallsAreCompleted) {
  for (const int64_t missing : {int64_t{1}, int64_t{4096}, int64_t{5000}, kMib}) {
    auto plan = NewPlan();
    // Seven: when all of them happen to strike one operation, an eighth call without a block is an error.
    for (int64_t nth = 1; nth < 14; nth += 2) plan->Shorten({.nth = nth}, missing);
    RoundTrip(make, plan);
  }
}

TEST_EACH_ENGINE(CallsThatNeverFillABlockAreAnError) {
  Folder folder;
  auto file = File::Open(folder.File("stalled"), kMib);
  if (!file->direct()) test::Skip("no direct I/O here: " + file->direct_refusal());
  auto plan = NewPlan();
  plan->Shorten({.count = 1000000}, 10 * kMib);
  auto engine = make(1, plan);
  AlignedBuffer memory(kMib);
  const auto error = CHECK_THROWS(IoError, "less than one block",
                                  Start(*engine, file, Access::kWrite, 0, memory.data(), kMib)->Wait());
  CHECK(error.kind() == IoErrorKind::kDevice);
}

TEST_EACH_ENGINE(AFlippedBitIsSeenByAComparisonOnly) {
  Folder folder;
  auto file = File::Open(folder.File("flipped"), kMib);
  const std::vector<std::byte> source = Pattern(kMib, 5);
  for (const int64_t shift : {0, 1}) {
    auto plan = NewPlan();
    auto engine = make(1, plan);
    AlignedBuffer memory(kMib + shift);
    std::byte* const at = memory.data() + shift;
    std::copy(source.begin(), source.end(), at);
    plan->FlipBit({}, 8 * 70000 + 3);
    Start(*engine, file, Access::kWrite, 0, at, kMib)->Wait();
    CHECK(std::equal(source.begin(), source.end(), at));  // the caller's memory is as it was
    std::vector<std::byte> written = source;
    written[70000] ^= std::byte{8};
    CHECK(Contents(folder.File("flipped")) == written);
    plan->FlipBit({}, 8 * kMib * 5);  // modulo the length: the first bit
    Start(*engine, file, Access::kRead, 0, at, kMib)->Wait();
    written[0] ^= std::byte{1};
    CHECK(std::equal(written.begin(), written.end(), at));
    CHECK_EQUAL(plan->struck().size(), 2u);
  }
}

/// A store of 50 chunks, each one operation, written and read twice: 200 operations.
class ChunkStore {
 public:
  static constexpr int64_t kChunks = 50;
  static constexpr int64_t kChunkBytes = kPage;

  ChunkStore(EngineMaker make, std::shared_ptr<FaultPlan> plan, const std::string& path)
      : file_(File::Open(path, kChunks * kChunkBytes)),
        engine_(make(4, std::move(plan))),
        memory_(kChunks * kChunkBytes) {}

  /// Starts a transfer for every chunk, half of them as one batch; returns the errors by chunk.
  std::map<int64_t, IoError> MoveAll(Access access) {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int64_t i = 0; i < kChunks; ++i) {
      const int64_t at = i * kChunkBytes;
      transfers.push_back(std::make_shared<Transfer>(file_, access, at, memory_.data() + at, kChunkBytes));
    }
    const std::span all(transfers);
    engine_->Submit(all.first(kChunks / 2), Priority::kNormal);
    for (size_t i = kChunks / 2; i < kChunks; ++i) engine_->Submit(all.subspan(i, 1), Priority::kUrgent);
    std::map<int64_t, IoError> errors;
    for (int64_t i = 0; i < kChunks; ++i) {
      try {
        transfers[static_cast<size_t>(i)]->Wait();
      } catch (const IoError& error) {
        errors.emplace(i, error);
      }
    }
    return errors;
  }

  std::span<std::byte> memory() { return {memory_.data(), static_cast<size_t>(memory_.size_bytes())}; }
  std::span<std::byte> chunk(std::span<std::byte> all, int64_t index) const {
    return all.subspan(static_cast<size_t>(index * kChunkBytes), kChunkBytes);
  }

 private:
  std::shared_ptr<File> file_;
  std::shared_ptr<IoEngine> engine_;
  AlignedBuffer memory_;
};

/// Exactly the operation that was struck failed, with its place.
void CheckErrors(const std::map<int64_t, IoError>& errors, const FaultPlan& plan, size_t struck_before,
                 int error_number) {
  const std::vector<FaultPlan::Struck> struck = plan.struck();
  CHECK_EQUAL(errors.size(), struck.size() - struck_before);
  if (errors.empty()) return;
  const auto& [chunk, error] = *errors.begin();
  CHECK_EQUAL(error.offset().value(), chunk * ChunkStore::kChunkBytes);
  CHECK_EQUAL(error.offset().value(), struck.back().offset);
  CHECK_EQUAL(error.path(), struck.back().path);
  CHECK_EQUAL(error.operation(), std::string(NameOf(struck.back().access)));
  CHECK_EQUAL(error.error_number(), error_number);
}

TEST_EACH_ENGINE(TheNthOperationFailingIsReportedAtItsPlaceAndNothingElseIsLost) {
  Folder folder;
  constexpr std::array kErrors = {EIO, ENOSPC, EDQUOT, EFBIG};
  const auto size = static_cast<size_t>(ChunkStore::kChunks * ChunkStore::kChunkBytes);
  for (int64_t n = 1; n <= 4 * ChunkStore::kChunks; ++n) {
    auto plan = NewPlan();
    const int error_number = kErrors[static_cast<size_t>(n) % kErrors.size()];
    ChunkStore store(make, plan, folder.File("chunks"));
    std::vector<std::byte> model = Contents(folder.File("chunks"));
    plan->Fail({.nth = n}, error_number);
    for (uint32_t round = 0; round < 2; ++round) {
      std::vector<std::byte> source =
          Pattern(static_cast<int64_t>(size), static_cast<uint32_t>(n) * 2 + round);
      std::copy(source.begin(), source.end(), store.memory().begin());
      size_t struck = plan->struck().size();
      const auto write_errors = store.MoveAll(Access::kWrite);
      CheckErrors(write_errors, *plan, struck, error_number);
      for (int64_t i = 0; i < ChunkStore::kChunks; ++i) {
        if (write_errors.contains(i)) continue;  // keeps what it held
        const auto from = store.chunk(source, i);
        std::copy(from.begin(), from.end(), store.chunk(model, i).begin());
      }
      std::fill(store.memory().begin(), store.memory().end(), std::byte{0});
      struck = plan->struck().size();
      const auto read_errors = store.MoveAll(Access::kRead);
      CheckErrors(read_errors, *plan, struck, error_number);
      for (int64_t i = 0; i < ChunkStore::kChunks; ++i) {
        if (read_errors.contains(i)) continue;
        const auto expected = store.chunk(model, i);
        CHECK(std::equal(expected.begin(), expected.end(), store.chunk(store.memory(), i).begin()));
      }
    }
    CHECK_EQUAL(plan->struck().size(), 1u);
    CHECK(Contents(folder.File("chunks")) == model);
  }
}

TEST_EACH_ENGINE(OfSeveralFailedExtentsTheFirstInTheRangeIsReported) {
  Folder folder;
  auto plan = NewPlan();
  auto file = File::Open(folder.File("extents"), 16 * kMib);
  auto engine = make(3, plan);
  AlignedBuffer memory(16 * kMib);
  plan->Fail({.nth = 2, .count = 100}, EIO);
  auto transfer = Start(*engine, file, Access::kRead, 0, memory.data(), 16 * kMib);
  const auto error = CHECK_THROWS(IoError, "read of", transfer->Wait());
  int64_t first = 16 * kMib;
  for (const FaultPlan::Struck& struck : plan->struck()) first = std::min(first, struck.offset);
  CHECK_EQUAL(error.offset().value(), first);
}

TEST(FaultRulesRefuseWhatTheyCannotDo) {
  FaultPlan plan;
  CHECK_THROWS(std::invalid_argument, "nth is 0", plan.Fail({.nth = 0}, EIO));
  CHECK_THROWS(std::invalid_argument, "count is 0", plan.Hold({.count = 0}));
  CHECK_THROWS(std::invalid_argument, "error_number is 0", plan.Fail({}, 0));
  CHECK_THROWS(std::invalid_argument, "missing_bytes is 0", plan.Shorten({}, 0));
  CHECK_THROWS(std::invalid_argument, "seconds is nan", plan.Slow({}, std::nan("")));
  CHECK_THROWS(std::invalid_argument, "bit is -1", plan.FlipBit({}, -1));
  CHECK_THROWS(std::invalid_argument, "bytes_per_second is 0", plan.LimitBandwidth("", 0));
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
