// A CUDA device that computes nothing, for fake tensors in a build of PyTorch without CUDA. Streams and events are numbers, which
// PyTorch's GPU trace is told of as by the real ones. What would make the host wait raises.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>

#include <atomic>

namespace at {
struct CUDAHooks final : CUDAHooksInterface { // the name that PyTorch looks for
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace c10::impl {
struct FakeDevice final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream(StreamId id) { return Stream(Stream::UNSAFE, device(), id); }
  static StreamId& current() {
    thread_local StreamId id = 0;
    return id;
  }
  static const PyInterpreter* trace() { return GPUTrace::get_trace(); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(current()); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override {
    static std::atomic<StreamId> made{0};
    return stream(++made);
  }
  Stream exchangeStream(Stream next) const noexcept override {
    auto before = current();
    current() = next.id();
    return stream(before);
  }
  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    static std::atomic<intptr_t> made{0};
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++made);
    }
    if (trace()) {
      (*trace())->trace_gpu_event_record(DeviceType::CUDA, reinterpret_cast<uintptr_t>(*event), on.id());
    }
  }
  void block(void* event, const Stream& on) const override {
    if (event != nullptr && trace()) {
      (*trace())->trace_gpu_event_wait(DeviceType::CUDA, reinterpret_cast<uintptr_t>(event), on.id());
    }
  }
  bool queryEvent(void*) const override { return false; }
  void synchronizeEvent(void*) const override { refuse("an event"); }
  void synchronizeStream(const Stream&) const override { refuse("a stream"); }
  void synchronizeDevice(const DeviceIndex) const override { refuse("the device"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    refuse("an event's time");
    return 0.0;
  }

 private:
  static void refuse(const char* what) { TORCH_CHECK(false, "the host waits for ", what); }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeDevice)
} // namespace c10::impl
