#pragma once

#include <string>

namespace lohan {

/// Owns one file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int value() const { return value_; }
  bool is_open() const { return value_ >= 0; }
  /// Closes and reports what close(2) says; the descriptor is gone either way.
  void Close(const std::string& path);

 private:
  int value_ = -1;
};

}  // namespace lohan
