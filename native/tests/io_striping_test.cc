// One file over several paths: where its bytes lie, and whose name an error bears.
#include <cerrno>

#include "io_fixture.h"

namespace lohan {
namespace {

using test::Contents;
using test::Folder;
using test::Pattern;
using test::Start;

constexpr int64_t kPage = 4096;

/// Where byte `at` of a file striped over `count` members lies, by the definition, one byte at a time.
std::pair<size_t, int64_t> Place(int64_t at, int64_t stripe_bytes, size_t count) {
  const int64_t stripe = at / stripe_bytes;
  const auto members = static_cast<int64_t>(count);
  return {static_cast<size_t>(stripe % members), stripe / members * stripe_bytes + at % stripe_bytes};
}

std::vector<std::string> Paths(const std::vector<std::unique_ptr<Folder>>& folders) {
  std::vector<std::string> paths;
  for (const auto& folder : folders) paths.push_back(folder->File("member"));
  return paths;
}

TEST_EACH_ENGINE(StripedBytesLieWhereTheDefinitionSays) {
  auto engine = make(2, nullptr);
  for (const size_t count : {size_t{1}, size_t{2}, size_t{3}}) {
    std::vector<std::unique_ptr<Folder>> folders(count);
    for (auto& folder : folders) folder = std::make_unique<Folder>();
    const std::vector<std::string> paths = Paths(folders);
    for (const int64_t stripe_bytes : {kPage, 5 * kPage}) {
      for (const int64_t size :
           {int64_t{0}, int64_t{1}, kPage, 10 * kPage, 31 * kPage + 17, 60 * kPage - 1}) {
        const std::vector<std::byte> model = Pattern(size, static_cast<uint32_t>(size));
        std::vector<std::byte> memory = model;
        auto file = File::Open(paths, size, stripe_bytes);
        for (int64_t at = 0; at < size; at += 7 * kPage + 5) {
          const int64_t length = std::min(size - at, 7 * kPage + 5);
          Start(*engine, file, Access::kWrite, at, memory.data() + at, length)->Wait();
        }
        file->Sync();
        file->Close();
        std::vector<std::vector<std::byte>> members;
        int64_t total = 0;
        for (const std::string& path : paths) {
          members.push_back(Contents(path));
          total += static_cast<int64_t>(members.back().size());
        }
        CHECK_EQUAL(total, size);
        for (int64_t at = 0; at < size; ++at) {
          const auto [member, offset] =
              count == 1 ? std::pair<size_t, int64_t>{0, at} : Place(at, stripe_bytes, count);
          CHECK(members[member].at(static_cast<size_t>(offset)) == model[static_cast<size_t>(at)]);
        }
        auto opened = File::Open(paths, std::nullopt, stripe_bytes);
        CHECK_EQUAL(opened->size_bytes(), size);
        std::fill(memory.begin(), memory.end(), std::byte{0});
        Start(*engine, opened, Access::kRead, 0, memory.data(), size)->Wait();
        CHECK(memory == model);
      }
    }
  }
}

TEST_EACH_ENGINE(AnErrorNamesTheMemberAndTheOffsetWithinIt) {
  Folder first;
  Folder second;
  auto plan = std::make_shared<FaultPlan>();
  auto engine = make(2, plan);
  auto file = File::Open({first.File("a"), second.File("b")}, 8 * kPage, kPage);
  AlignedBuffer memory(8 * kPage);
  plan->Fail({.nth = 3, .path_prefix = second.File("")}, EIO);
  Start(*engine, file, Access::kWrite, 0, memory.data(), 4 * kPage)->Wait();
  auto transfer = Start(*engine, file, Access::kWrite, 4 * kPage, memory.data(), 2 * kPage);
  const auto error =
      CHECK_THROWS(IoError, "write of " + second.File("b") + " at byte 8192", transfer->Wait());
  CHECK_EQUAL(error.path(), second.File("b"));
  CHECK_EQUAL(error.offset().value(), 2 * kPage);
}

TEST(WhatIsNotStripedLikeThisIsRefused) {
  Folder folder;
  const std::vector<std::string> paths = {folder.File("a"), folder.File("b")};
  CHECK_THROWS(std::invalid_argument, "paths is empty", File::Open(std::vector<std::string>{}, 1));
  for (const int64_t stripe_bytes : {int64_t{0}, int64_t{-4096}, int64_t{100}}) {
    CHECK_THROWS(std::invalid_argument, "stripe_bytes is " + std::to_string(stripe_bytes),
                 File::Open(paths, 1, stripe_bytes));
  }
  CHECK_THROWS(std::invalid_argument, "are one file",
               File::Open({folder.File("a"), folder.File("./a")}, kPage, kPage));
  CHECK(!std::filesystem::exists(folder.File("a")));
  File::Open(paths, 5 * kPage + 1, kPage);
  CHECK_EQUAL(File::Open(paths, std::nullopt, kPage)->size_bytes(), 5 * kPage + 1);
  const auto reversed = [&] { return File::Open({paths[1], paths[0]}, std::nullopt, kPage); };
  CHECK_THROWS(std::invalid_argument, "name the files in the order", reversed());
  CHECK_THROWS(std::invalid_argument, "stripe_bytes", File::Open(paths, std::nullopt, 2 * kPage));
  CHECK_THROWS(IoError, "No such file", File::Open({paths[0], folder.File("c")}, std::nullopt, kPage));
  CHECK(!std::filesystem::exists(folder.File("c")));
}

TEST(WhenOneMemberDoesNotFitAllAreAsTheyWere) {
  Folder folder;
  Folder other;
  std::ofstream(folder.File("old")) << "kept";
  // The last path's folder does not exist: by then the others are open.
  CHECK_THROWS(
      IoError, "No such file",
      File::Open({folder.File("old"), folder.File("new"), other.File("none/x")}, 100 * kPage, kPage));
  CHECK_EQUAL(std::filesystem::file_size(folder.File("old")), 4u);
  CHECK(!std::filesystem::exists(folder.File("new")));
  // A file larger than any filesystem here: allocation of the first member fails, the second is new.
  const int64_t too_large = int64_t{1} << 60;
  CHECK_THROWS(IoError, "allocate of",
               File::Open({folder.File("old"), folder.File("new")}, too_large, kPage));
  CHECK_EQUAL(std::filesystem::file_size(folder.File("old")), 4u);
  CHECK(!std::filesystem::exists(folder.File("new")));
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
