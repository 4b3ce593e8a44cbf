// A CUDA runtime without a GPU, built as libcudart.so.13. How it is used, and its limits, stand in __init__.py.
//
// Device memory is host memory. A stream is a queue of copies, waits and messages. A queue advances only when something waits for
// it (the host, another stream on the host's behalf, or another process that waits for its message), so every copy runs as late as
// the declared order allows. While a stream is stuck at a message, the other streams go on, but with real messages between
// processes only those that another process waits for, so that nothing depends on how long a process takes. Kernels cannot run: a
// launch is an error, because machine/computing.py computes on the CPU before torch would launch anything.
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kDeviceBytes = 139ull << 30;
// how often the host may ask for one unfinished event before it is found finished: time passes while a host polls
constexpr int kPolls = 1000;

struct Stream;

// work of a stream: it runs when `other` has come to `position` and `is_ready`, where these are given
struct Operation {
  std::function<cudaError_t()> run;
  Stream* other = nullptr;
  long position = 0;
  std::function<bool()> is_ready;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  long pushed = 0, done = 0;
  bool is_advancing = false;
};

struct Event {
  Stream* stream = nullptr;
  long position = 0;
  int polls = 0;
  double host_s = 0;
};

// one lock for all state; recursive, because a queue that advances may advance another one
std::recursive_mutex state_lock;
#define LOCK std::lock_guard<std::recursive_mutex> guard(state_lock)

std::map<char*, size_t> device_memory, pinned_memory;
size_t device_bytes = 0;
std::map<std::string, long> counts;
std::vector<Stream*> streams;
long copies_under_way = 0;
bool pins = true;
std::string last_message;
cudaError_t last_error = cudaSuccess;
void (*on_wait)(const char*) = nullptr;

// messages that a stream waits for, with a lock of their own: another thread delivers them while a stream is stuck
std::mutex message_lock;
std::set<long> missing;
long next_message = 1;
double patience_s = 5.0;
// how long the host sleeps while all streams are stuck
constexpr auto kNap = std::chrono::microseconds(50);

// messages between processes: files of a folder that all of them share. A process whose stream is stuck at a message asks for it
// by an empty file, since the sender's queue would not advance by itself
std::string mail_folder;
std::map<std::string, std::pair<Stream*, long>> sends;

cudaError_t fail(cudaError_t error, const std::string& message) {
  last_message = message;
  return last_error = error;
}

void count(const std::string& name) { counts[name]++; }

// counts a wait of the host for the device and reports it, without the lock, since the listener takes Python's
void host_waits(const char* name) {
  {
    LOCK;
    count(name);
    count("host waits");
  }
  if (on_wait) on_wait(name);
}

Stream* stream_of(cudaStream_t handle) {
  static Stream* first = streams.emplace_back(new Stream);
  bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? first : reinterpret_cast<Stream*>(handle);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// runs what can run on the stream up to a position; false if something keeps the stream from it
bool run_to(Stream* stream, long position, cudaError_t& error) {
  // a stream that waits for a stream that waits for it
  if (stream->done >= position || stream->is_advancing) return stream->done >= position;
  stream->is_advancing = true;
  while (stream->done < position && !stream->queue.empty()) {
    auto& next = stream->queue.front();
    if (next.other && !run_to(next.other, next.position, error)) break;
    if (next.is_ready && !next.is_ready()) break;
    auto operation = std::move(next);
    stream->queue.pop_front();
    stream->done++;
    if (!operation.run) continue;
    if (auto found = operation.run()) error = found;
  }
  stream->is_advancing = false;
  return stream->done >= position;
}

// what all streams have done together
long all_done() {
  long sum = 0;
  for (auto* stream : streams) sum += stream->done;
  return sum;
}

// takes away the message at which a stream is stuck, perhaps by way of others
void give_up(Stream* stream) {
  for (size_t i = 0; i < streams.size() && !stream->queue.empty(); i++) {
    auto& next = stream->queue.front();
    if (!next.other || next.other->done >= next.position) break;
    stream = next.other;
  }
  if (stream->queue.empty()) return;
  stream->queue.pop_front();
  stream->done++;
}

std::string mail(const std::string& name) { return mail_folder + "/" + name; }
std::string wish(const std::string& name) { return mail_folder + "/wanted/" + name; }

// lets streams go on that other processes wait for
void answer_wishes() {
  auto* folder = opendir(wish("").c_str());
  if (!folder) return;
  std::vector<std::string> names;
  while (auto* entry = readdir(folder)) names.push_back(entry->d_name);
  closedir(folder);
  cudaError_t error = cudaSuccess;
  for (auto& name : names) {
    auto found = sends.find(name);
    if (found != sends.end()) run_to(found->second.first, found->second.second, error);
  }
}

void let_others_go_on(cudaError_t& error) {
  if (!mail_folder.empty()) return answer_wishes();
  for (size_t i = 0; i < streams.size(); i++) run_to(streams[i], streams[i]->pushed, error);
}

cudaError_t advance(Stream* stream, long position) {
  cudaError_t error = cudaSuccess;
  double since_s = now_s();
  while (!run_to(stream, position, error)) {
    long before = all_done();
    let_others_go_on(error);
    if (all_done() != before) {
      since_s = now_s();
    } else if (now_s() - since_s > patience_s) {
      give_up(stream);
      error = fail(cudaErrorLaunchTimeout, "the device waits for a message that nobody sends");
      since_s = now_s();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return error;
}

cudaError_t advance_all() {
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i < streams.size(); i++)
    if (auto found = advance(streams[i], streams[i]->pushed)) error = found;
  return error;
}

void push(Stream* stream, Operation operation) {
  stream->queue.push_back(std::move(operation));
  stream->pushed++;
}
void push(Stream* stream, std::function<cudaError_t()> run) { push(stream, Operation{std::move(run)}); }

bool lies_in(const std::map<char*, size_t>& memory, const void* address) {
  auto after = memory.upper_bound((char*)address);
  if (after == memory.begin()) return false;
  --after;
  return (char*)address < after->first + after->second;
}

cudaError_t copy(void* target, const void* source, size_t bytes, Stream* stream) {
  LOCK;
  count("copies");
  copies_under_way++;
  push(stream, [=] {
    memmove(target, source, bytes);
    copies_under_way--;
    return cudaSuccess;
  });
  return cudaSuccess;
}

// CUDA makes the host wait for copies from and to memory that is not pinned
cudaError_t copy_async(void* target, const void* source, size_t bytes, Stream* stream) {
  bool is_pageable;
  {
    LOCK;
    auto known = [](const void* p) { return lies_in(device_memory, p) || lies_in(pinned_memory, p); };
    is_pageable = !known(target) || !known(source);
  }
  copy(target, source, bytes, stream);
  if (!is_pageable) return cudaSuccess;
  host_waits("copy of pageable memory");
  LOCK;
  return advance(stream, stream->pushed);
}

// whether a message is there; asks for it if not
bool has_come(const std::string& name) {
  if (access(mail(name).c_str(), F_OK) == 0) return unlink(wish(name).c_str()), true;
  if (access(wish(name).c_str(), F_OK) != 0) std::ofstream(wish(name)).flush();
  return false;
}

std::vector<char> taken(const std::string& name) {
  std::ifstream file(mail(name), std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  unlink(mail(name).c_str());
  return bytes;
}

void serve() {
  for (;; std::this_thread::sleep_for(kNap * 10)) {
    LOCK;
    answer_wishes();
  }
}

float widened(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
void keep_larger(char* target, const char* source, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(T); i++) ((T*)target)[i] = std::max(((T*)target)[i], ((const T*)source)[i]);
}
template <class T>
void add(char* target, const char* source, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(T); i++) ((T*)target)[i] += ((const T*)source)[i];
}
void add_halves(char* target, const char* source, size_t bytes) {
  auto *to = (uint16_t*)target, *from = (uint16_t*)source;
  for (size_t i = 0; i < bytes / 2; i++) to[i] = narrowed(widened(to[i]) + widened(from[i]));
}

}  // namespace

extern "C" {

// ---- what tests see and set

long fake_cuda_count(const char* name) {
  LOCK;
  auto found = counts.find(name);
  return found == counts.end() ? 0 : found->second;
}
void fake_cuda_note_wait(const char* name) { host_waits(name); }
void fake_cuda_listen(void (*listener)(const char*)) { on_wait = listener; }
// advances one stream, or all of them; no wait of the host. The caller raises the error, so CUDA forgets it
int fake_cuda_advance(void* stream) {
  LOCK;
  auto* found = stream_of((cudaStream_t)stream);
  int error = advance(found, found->pushed);
  last_error = cudaSuccess;
  return error;
}
int fake_cuda_advance_all() {
  LOCK;
  int error = advance_all();
  last_error = cudaSuccess;
  return error;
}
void fake_cuda_set_pins(bool value) { pins = value; }
void fake_cuda_set_patience(double seconds) { patience_s = seconds; }

// a receive of a communicator: the stream is stuck until the message is delivered
long fake_cuda_receive(void* stream) {
  long message;
  {
    std::lock_guard<std::mutex> guard(message_lock);
    missing.insert(message = next_message++);
  }
  LOCK;
  count("receives");
  push(stream_of((cudaStream_t)stream), Operation{nullptr, nullptr, 0, [message] {
    std::lock_guard<std::mutex> guard(message_lock);
    return !missing.count(message);
  }});
  return message;
}
void fake_cuda_deliver(long message) {
  std::lock_guard<std::mutex> guard(message_lock);
  missing.erase(message);
}

// lets this process exchange messages with others that were given the same folder
void fake_cuda_open_mail(const char* folder) {
  LOCK;
  mail_folder = folder;
  std::thread(serve).detach();
}
// queues a message whose bytes are read when the stream comes to it
void fake_cuda_mail(void* handle, const char* name, const void* source, size_t bytes) {
  LOCK;
  count("messages sent");
  auto* stream = stream_of((cudaStream_t)handle);
  push(stream, [=, name = std::string(name)] {
    std::ofstream(mail(name + ".part"), std::ios::binary).write((const char*)source, bytes).flush();
    rename(mail(name + ".part").c_str(), mail(name).c_str());
    sends.erase(name);
    return cudaSuccess;
  });
  sends[name] = {stream, stream->pushed};
}
// queues a receive: the stream is stuck until the message comes, whose bytes replace (kind 0) those of `target`, or are added to
// them as numbers: 1 bfloat16, 2 float, 3 double, 4 long; or the larger of two numbers stays: 12 float, 13 double
void fake_cuda_take_mail(void* handle, const char* name, void* target, size_t bytes, int kind) {
  LOCK;
  count("receives");
  auto run = [=, name = std::string(name)] {
    auto found = taken(name);
    if (found.size() != bytes) return fail(cudaErrorInvalidValue, "a message has another size than its receive: " + name);
    auto *to = (char*)target, *from = found.data();
    if (kind == 0) memcpy(to, from, bytes);
    if (kind == 1) add_halves(to, from, bytes);
    if (kind == 2) add<float>(to, from, bytes);
    if (kind == 3) add<double>(to, from, bytes);
    if (kind == 4) add<long>(to, from, bytes);
    if (kind == 12) keep_larger<float>(to, from, bytes);
    if (kind == 13) keep_larger<double>(to, from, bytes);
    return cudaSuccess;
  };
  push(stream_of((cudaStream_t)handle), Operation{run, nullptr, 0, [name = std::string(name)] { return has_come(name); }});
}

// ---- devices

static thread_local int current_device = 0;

cudaError_t cudaGetDeviceCount(int* number) { return *number = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "Fake H200");
  found->totalGlobalMem = kDeviceBytes;
  found->major = 9;
  found->warpSize = 32;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 227 << 10;
  found->sharedMemPerMultiprocessor = 228 << 10;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 60 << 20;
  found->unifiedAddressing = found->managedMemory = found->concurrentKernels = 1;
  found->textureAlignment = 512;
  found->memoryBusWidth = 6144;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int device) {
  snprintf(name, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  host_waits("cudaDeviceSynchronize");
  LOCK;
  return advance_all();
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCK;
  *total = kDeviceBytes;
  *free = kDeviceBytes - device_bytes;
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** address, size_t bytes) {
  LOCK;
  count("cudaMalloc");
  *address = nullptr;
  if (device_bytes + bytes > kDeviceBytes) return fail(cudaErrorMemoryAllocation, "out of memory");
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "out of memory");
  device_memory[(char*)made] = bytes;
  device_bytes += bytes;
  *address = made;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  host_waits("cudaFree");
  LOCK;
  auto error = advance_all();
  auto found = device_memory.find((char*)address);
  if (found == device_memory.end()) return fail(cudaErrorInvalidValue, "not memory of the device");
  munmap(address, found->second);
  device_bytes -= found->second;
  device_memory.erase(found);
  return error;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  LOCK;
  count("cudaHostAlloc");
  if (posix_memalign(address, 4096, bytes)) return fail(cudaErrorMemoryAllocation, "out of host memory");
  pinned_memory[(char*)*address] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  host_waits("cudaFreeHost");
  LOCK;
  auto error = advance_all();
  pinned_memory.erase((char*)address);
  free(address);
  return error;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  LOCK;
  count("cudaHostRegister");
  if (!pins) return fail(cudaErrorMemoryAllocation, "no more memory may be pinned");
  pinned_memory[(char*)address] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  LOCK;
  count("cudaHostUnregister");
  if (copies_under_way) count("cudaHostUnregister under copies");
  auto error = advance_all();
  if (!pinned_memory.erase((char*)address)) return fail(cudaErrorHostMemoryNotRegistered, "memory is not pinned");
  return error;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  LOCK;
  memset(found, 0, sizeof *found);
  bool is_device = lies_in(device_memory, address), is_pinned = lies_in(pinned_memory, address);
  found->type = is_device ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (is_device || is_pinned) found->devicePointer = (void*)address;
  if (is_pinned) found->hostPointer = (void*)address;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  host_waits("cudaMemcpy");
  auto* stream = stream_of(nullptr);
  copy(target, source, bytes, stream);
  LOCK;
  return advance(stream, stream->pushed);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy_async(target, source, bytes, stream_of(stream));
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  LOCK;
  push(stream_of(stream), [=] {
    memset(target, value, bytes);
    return cudaSuccess;
  });
  return cudaSuccess;
}

// ---- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  LOCK;
  stream_of(nullptr);
  auto* stream = streams.emplace_back(new Stream);
  stream->flags = flags;
  stream->priority = priority;
  *made = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { return *priority = stream_of(stream)->priority, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  host_waits("cudaStreamSynchronize");
  LOCK;
  return advance(stream_of(stream), stream_of(stream)->pushed);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  LOCK;
  return stream_of(stream)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t waiting, cudaEvent_t handle, unsigned) {
  LOCK;
  count("cudaStreamWaitEvent");
  auto* event = (Event*)handle;
  auto *stream = event->stream, *own = stream_of(waiting);
  // by value: the event may be recorded again or destroyed before this wait comes up
  long position = event->position;
  if (stream && stream != own) push(own, Operation{nullptr, stream, position});
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) { return *made = (cudaEvent_t) new Event, cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) { return delete (Event*)handle, cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  LOCK;
  auto* event = (Event*)handle;
  *event = Event{stream_of(stream), 0, 0, now_s()};
  push(event->stream, [] { return cudaSuccess; });
  event->position = event->stream->pushed;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) { return cudaEventRecordWithFlags(handle, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LOCK;
  auto* event = (Event*)handle;
  if (!event->stream || event->stream->done >= event->position) return cudaSuccess;
  if (++event->polls < kPolls) return cudaErrorNotReady;
  return advance(event->stream, event->position);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  bool is_waiting;
  {
    LOCK;
    is_waiting = event->stream && event->stream->done < event->position;
  }
  // an event that has passed costs nothing
  if (!is_waiting) return cudaSuccess;
  host_waits("cudaEventSynchronize");
  LOCK;
  return advance(event->stream, event->position);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t stop) {
  LOCK;
  for (auto* event : {(Event*)start, (Event*)stop})
    if (event->stream && event->stream->done < event->position) return fail(cudaErrorNotReady, "an event has not passed yet");
  *ms = (float)((((Event*)stop)->host_s - ((Event*)start)->host_s) * 1e3);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  LOCK;
  push(stream_of(stream), [=] { return function(data), cudaSuccess; });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  LOCK;
  push(stream_of(stream), [=] { return function(stream, cudaSuccess, data), cudaSuccess; });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- errors

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : last_message.empty() ? "error of the fake device" : last_message.c_str();
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---- kernels: registered when torch is loaded, never run

static std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  LOCK;
  kernel_names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
static cudaError_t refuse(const void* function) {
  LOCK;
  auto found = kernel_names().find(function);
  return fail(cudaErrorNotSupported,
              "the fake device runs no kernels: " + (found == kernel_names().end() ? std::string("?") : found->second));
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return refuse(function); }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { return refuse(function); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { return refuse((const void*)kernel); }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *(cudaStream_t*)stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// ---- the driver, which torch asks whether a device is in use, and for names of errors

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, 0; }
int cuCtxGetCurrent(void** context) {
  static int only;
  return *context = &only, 0;
}
int cuGetErrorString(int, const char** text) { return *text = "error of the fake driver", 0; }
}
