#pragma once

#include <cstddef>
#include <cstdint>

namespace lohan {

/// Owns a shared mapping of a file from its beginning, for reading and writing. A mapped page that cannot be
/// had (of a file that was cut, or of a hole in a full filesystem) is answered with SIGBUS: whoever uses a
/// mapping sees to it that there are none.
class FileMapping {
 public:
  FileMapping() = default;
  /// Maps nothing where the system refuses: `data` is null then.
  FileMapping(int descriptor, int64_t size_bytes) noexcept;
  FileMapping(FileMapping&& other) noexcept;
  FileMapping& operator=(FileMapping&& other) noexcept;
  ~FileMapping();

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace lohan
