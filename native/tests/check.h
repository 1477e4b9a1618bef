// The whole test framework: TEST bodies run in order, CHECK throws, Skip says what the machine lacks.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace lohan::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void Skip(const std::string& reason) { throw Skipped(reason); }

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

struct Registration {
  Registration(const char* name, void (*body)()) { Cases().push_back({name, body}); }
};

template <typename A, typename B>
void CheckEqual(const A& actual, const B& expected, const char* text, const char* file, int line) {
  if (actual == expected) return;
  std::ostringstream message;
  message << file << ":" << line << ": " << text << ": got " << actual << ", expected " << expected;
  throw Failure(message.str());
}

/// Runs `call`, which must throw an Error whose text holds `part`; returns the error.
template <typename Error, typename Call>
Error CheckThrows(const std::string& part, Call&& call, const char* file, int line) {
  const std::string place = std::string(file) + ":" + std::to_string(line) + ": ";
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      throw Failure(place + "\"" + error.what() + "\" does not hold \"" + part + "\"");
    }
    return error;
  } catch (const std::exception& error) {
    throw Failure(place + "an error of another type was thrown: " + error.what());
  }
  throw Failure(place + "nothing was thrown, expected \"" + part + "\"");
}

inline int RunAll() {
  size_t failed = 0;
  size_t skipped = 0;
  for (const Case& test : Cases()) {
    try {
      test.body();
      std::printf("pass  %s\n", test.name);
    } catch (const Skipped& reason) {
      ++skipped;
      std::printf("skip  %s: %s\n", test.name, reason.what());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL  %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  if (failed > 0) return 1;
  return skipped == Cases().size() ? 77 : 0;
}

}  // namespace lohan::test

#define TEST(name)                                                           \
  static void name();                                                        \
  static const ::lohan::test::Registration name##_registration(#name, name); \
  static void name()

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      throw ::lohan::test::Failure(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                                   ": " #condition);                                        \
    }                                                                                       \
  } while (false)
#define CHECK_EQUAL(actual, expected) \
  ::lohan::test::CheckEqual((actual), (expected), #actual, __FILE__, __LINE__)
#define CHECK_THROWS(Error, part, ...) \
  ::lohan::test::CheckThrows<Error>(part, [&] { static_cast<void>(__VA_ARGS__); }, __FILE__, __LINE__)
