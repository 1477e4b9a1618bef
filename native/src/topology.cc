#include "lohan/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

namespace lohan {
namespace {

std::optional<int> ReadNumber(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  int number = 0;
  if (file != nullptr && std::fscanf(file.get(), "%d", &number) == 1) return number;
  return std::nullopt;
}

/// The node whose folder stands in the CPU's own: cpu3/node1. With readdir, not std::filesystem: PyTorch's
/// libraries carry their own copy of the latter, which the linker then takes for ours, and which crashes.
int NodeOf(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(folder.c_str()), closedir);
  if (directory == nullptr) return 0;
  while (const dirent* entry = readdir(directory.get())) {
    const std::string name = entry->d_name;
    if (name.rfind("node", 0) == 0 && name.size() > 4 &&
        name.find_first_not_of("0123456789", 4) == std::string::npos) {
      return std::stoi(name.substr(4));
    }
  }
  return 0;
}

}  // namespace

std::vector<Cpu> AllowedCpus(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return {};
  std::vector<Cpu> cpus;
  std::map<std::pair<int, int>, int> cores;  // (package, core within it) to a number of our own
  for (int number = 0; number < CPU_SETSIZE; ++number) {
    if (!CPU_ISSET(number, &set)) continue;
    const std::string folder = root + "/devices/system/cpu/cpu" + std::to_string(number);
    const int package = ReadNumber(folder + "/topology/physical_package_id").value_or(0);
    // A CPU without a known core is one by itself: no real number is below -1.
    const int core = ReadNumber(folder + "/topology/core_id").value_or(-2 - number);
    const int place = cores.emplace(std::pair(package, core), static_cast<int>(cores.size())).first->second;
    cpus.push_back({number, place, NodeOf(folder)});
  }
  return cpus;
}

std::vector<Cpu> ChooseCpus(const std::vector<Cpu>& allowed, int threads) {
  if (threads < 1 || static_cast<size_t>(threads) > allowed.size()) return {};
  struct Candidate {
    int sibling;  // how many CPUs of its core come before it
    int turn;     // how many of its node with the same sibling number do
    Cpu cpu;
  };
  std::map<int, int> siblings;
  std::map<std::pair<int, int>, int> turns;
  std::vector<Candidate> candidates;
  for (const Cpu& cpu : allowed) {
    const int sibling = siblings[cpu.core]++;
    candidates.push_back({sibling, turns[{cpu.node, sibling}]++, cpu});
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(a.sibling, a.turn, a.cpu.node) < std::tuple(b.sibling, b.turn, b.cpu.node);
  });
  std::vector<Cpu> chosen;
  for (int i = 0; i < threads; ++i) chosen.push_back(candidates[static_cast<size_t>(i)].cpu);
  std::sort(chosen.begin(), chosen.end(), [](const Cpu& a, const Cpu& b) {
    return std::tuple(a.node, a.number) < std::tuple(b.node, b.number);
  });
  return chosen;
}

}  // namespace lohan
