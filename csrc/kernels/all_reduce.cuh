// Sums over ranks through memory that all of them map, in one kernel per rank.
//
// Every rank has a buffer: flags, counters, and two halves of `capacity` bytes. A call copies the message into a half,
// meets the other ranks, and reads theirs. One shot: every rank sums all of it. Two shots: each rank sums its part, all
// meet again, and every rank reads the parts of the others.
//
//     rank 0   copy in |meet| sum part 0 |meet| read parts 1, 2, 3
//     rank 1   copy in |meet| sum part 1 |meet| read parts 0, 2, 3      (two shots, four ranks)
//
// Blocks meet the blocks of the same number on the other ranks and use only what those wrote, so no barrier spans a
// grid. Calls alternate between the halves: who has met for call n + 1 has left call n, so call n + 2 may overwrite it.
// Every call has kPeerBlocks blocks, so all counters of a rank agree, and a captured call can be replayed.
#pragma once

#include "merak/pack.h"
#include "merak/signal.h"

#ifndef __CUDACC__
#define __grid_constant__
#endif

namespace merak {

constexpr int kPeers = 8;
constexpr int kPeerBlocks = 32, kPeerThreads = 512;
constexpr int kPeerHeader = 4096;  // bytes before the halves
// Packs that a thread asks for before it waits for the first of them. A pack of every thread is 256 KiB in flight, and a
// link of 360 GB/s brings as much in less than the microsecond that an answer takes. Two shots ask for one of each rank.
constexpr int kPeerPacks = 4;
static_assert(kPeerBlocks * (kPeers + 1) * sizeof(uint32_t) <= kPeerHeader);

// base: every rank's buffer, in rank order. patience: nanoseconds to wait for a peer before the launch fails.
struct Peers {
  char* base[kPeers];
  int rank;
  int64_t capacity;
  uint64_t patience;
};

// The threads of a block; tests put threads of the host in their place.
struct Block {
  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int number() const { return blockIdx.x; }
  __device__ int count() const { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }
};

__device__ __forceinline__ uint32_t* flag_of(const Peers& peers, int owner, int block, int from) {
  return reinterpret_cast<uint32_t*>(peers.base[owner]) + block * kPeers + from;
}

// Calls that a block of this rank has made.
__device__ __forceinline__ uint32_t* calls_of(const Peers& peers, int block) {
  return reinterpret_cast<uint32_t*>(peers.base[peers.rank]) + kPeerBlocks * kPeers + block;
}

template <class T>
__device__ __forceinline__ T* half_of(const Peers& peers, int owner, uint32_t call) {
  return reinterpret_cast<T*>(peers.base[owner] + kPeerHeader + (call % 2) * peers.capacity);
}

// What the blocks of this number wrote before, on all ranks, is seen by all of them after. Values only grow.
template <int WORLD, class Team>
__device__ __forceinline__ void meet(const Team& team, const Peers& peers, uint32_t value) {
  team.sync();
  for (int peer = team.thread(); peer < WORLD; peer += team.threads())
    signal::release(flag_of(peers, peer, team.number(), peers.rank), value);
  for (int peer = team.thread(); peer < WORLD; peer += team.threads())
    signal::await(flag_of(peers, peers.rank, team.number(), peer), value, peers.patience);
  team.sync();
}

// Copies the packs at(0) to at(COUNT - 1) of a message, of those that it has. What does not move in one piece is moved
// after the others, which wait for nothing.
template <class T, int COUNT, class At>
__device__ __forceinline__ void copy_packs(const T* from, T* to, int64_t count, bool vector, const At& at) {
  constexpr int N = kPack<T>;
  Pack<T, N> held[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (vector && count - at(i) * N >= N) held[i] = load<T, N>(from + at(i) * N);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int64_t left = count - at(i) * N;
    if (vector && left >= N) {
      store(to + at(i) * N, held[i]);
    } else if (left > 0) {
      store(to + at(i) * N, load<T, N>(from + at(i) * N, left, false));
    }
  }
}

// All ranks' packs at one place.
template <class T, int WORLD>
struct Parts {
  Pack<T, kPack<T>> of[WORLD];
};

template <class T, int WORLD>
__device__ __forceinline__ Parts<T, WORLD> parts_at(const Peers& peers, uint32_t call, int64_t pack) {
  constexpr int N = kPack<T>;
  Parts<T, WORLD> parts;
#pragma unroll
  for (int rank = 0; rank < WORLD; ++rank) parts.of[rank] = load<T, N>(half_of<T>(peers, rank, call) + pack * N);
  return parts;
}

// Their sum in fp32 and in rank order: the same bits wherever it is taken.
template <class T, int WORLD>
__device__ __forceinline__ Pack<T, kPack<T>> sum_of(const Parts<T, WORLD>& parts) {
  constexpr int N = kPack<T>;
  Pack<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float total = widen(parts.of[0].at[i]);
#pragma unroll
    for (int rank = 1; rank < WORLD; ++rank) total += widen(parts.of[rank].at[i]);
    sum.at[i] = narrow<T>(total);
  }
  return sum;
}

// to = the sum over ranks of from; they may be the same. At most `capacity` bytes. vector: both are aligned.
template <class T, int WORLD, class Team>
__device__ __forceinline__ void one_shot(const Team& team, const Peers& peers, const T* from, T* to, int64_t count,
                                         bool vector) {
  constexpr int N = kPack<T>;
  const uint32_t call = *calls_of(peers, team.number());
  const int64_t packs = (count + N - 1) / N, step = int64_t(team.count()) * team.threads();
  const int64_t first = int64_t(team.number()) * team.threads() + team.thread();
  T* own = half_of<T>(peers, peers.rank, call);
  for (int64_t start = first; start < packs; start += kPeerPacks * step)
    copy_packs<T, kPeerPacks>(from, own, count, vector, [&](int i) { return start + i * step; });
  meet<WORLD>(team, peers, 2 * call + 1);
  constexpr int kPlaces = kPeerPacks > WORLD ? kPeerPacks / WORLD : 1;
  for (int64_t start = first; start < packs; start += kPlaces * step) {
    Parts<T, WORLD> parts[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i)
      if (start + i * step < packs) parts[i] = parts_at<T, WORLD>(peers, call, start + i * step);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int64_t pack = start + i * step;
      if (pack < packs) store(to + pack * N, sum_of(parts[i]), count - pack * N, vector);
    }
  }
  if (team.thread() == 0) *calls_of(peers, team.number()) = call + 1;
}

template <class T, int WORLD, class Team>
__device__ __forceinline__ void two_shot(const Team& team, const Peers& peers, const T* from, T* to, int64_t count,
                                         bool vector) {
  constexpr int N = kPack<T>;
  const uint32_t call = *calls_of(peers, team.number());
  const int64_t packs = (count + N - 1) / N, part = (packs + WORLD - 1) / WORLD;
  const int64_t step = int64_t(team.count()) * team.threads();
  const int64_t first = int64_t(team.number()) * team.threads() + team.thread();
  T* own = half_of<T>(peers, peers.rank, call);
  for (int64_t place = first; place < part; place += step)
    copy_packs<T, WORLD>(from, own, count, vector, [&](int rank) { return rank * part + place; });
  meet<WORLD>(team, peers, 2 * call + 1);
  for (int64_t place = first; place < part; place += step) {
    const int64_t pack = peers.rank * part + place;  // no other rank reads this place before the second meeting
    if (pack < packs) store(own + pack * N, sum_of(parts_at<T, WORLD>(peers, call, pack)));
  }
  meet<WORLD>(team, peers, 2 * call + 2);
  for (int64_t place = first; place < part; place += step) {
    Parts<T, WORLD> sums;
#pragma unroll
    for (int rank = 0; rank < WORLD; ++rank) {
      const int64_t pack = rank * part + place;
      if (pack < packs) sums.of[rank] = load<T, N>(half_of<T>(peers, rank, call) + pack * N);
    }
#pragma unroll
    for (int rank = 0; rank < WORLD; ++rank) {
      const int64_t pack = rank * part + place;
      if (pack < packs) store(to + pack * N, sums.of[rank], count - pack * N, vector);
    }
  }
  if (team.thread() == 0) *calls_of(peers, team.number()) = call + 1;
}

template <class T, int WORLD, bool TWO>
__global__ void __launch_bounds__(kPeerThreads)
    all_reduce(const __grid_constant__ Peers peers, const T* from, T* to, int64_t count, bool vector) {
  if constexpr (TWO) {
    two_shot<T, WORLD>(Block(), peers, from, to, count, vector);
  } else {
    one_shot<T, WORLD>(Block(), peers, from, to, count, vector);
  }
}

}  // namespace merak
