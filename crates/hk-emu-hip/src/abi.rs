//! Structures that cross the ABI, by the published headers of HIP 5 to 7. Sizes and offsets are checked below.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

/// `dim3`, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl From<Dim3> for [u32; 3] {
    fn from(d: Dim3) -> [u32; 3] {
        [d.x, d.y, d.z]
    }
}

/// `hipDeviceProp_tR0600`: `hipDeviceProp_t` of HIP 6 and 7.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct PropertiesR0600 {
    pub name: [u8; 256],
    pub uuid: [u8; 16],
    pub luid: [u8; 8],
    pub luid_device_node_mask: u32,
    pub pad0: u32,
    pub total_global_mem: u64,
    pub shared_mem_per_block: u64,
    pub regs_per_block: i32,
    pub warp_size: i32,
    pub mem_pitch: u64,
    pub max_threads_per_block: i32,
    pub max_threads_dim: [i32; 3],
    pub max_grid_size: [i32; 3],
    pub clock_rate: i32,
    pub total_const_mem: u64,
    pub major: i32,
    pub minor: i32,
    pub texture_alignment: u64,
    pub texture_pitch_alignment: u64,
    pub device_overlap: i32,
    pub multi_processor_count: i32,
    pub kernel_exec_timeout_enabled: i32,
    pub integrated: i32,
    pub can_map_host_memory: i32,
    pub compute_mode: i32,
    /// Limits of textures and surfaces: there are none of them.
    pub images: [i32; 40],
    pub surface_alignment: u64,
    pub concurrent_kernels: i32,
    pub ecc_enabled: i32,
    pub pci_bus_id: i32,
    pub pci_device_id: i32,
    pub pci_domain_id: i32,
    pub tcc_driver: i32,
    pub async_engine_count: i32,
    pub unified_addressing: i32,
    pub memory_clock_rate: i32,
    pub memory_bus_width: i32,
    pub l2_cache_size: i32,
    pub persisting_l2_cache_max_size: i32,
    pub max_threads_per_multi_processor: i32,
    pub stream_priorities_supported: i32,
    pub global_l1_cache_supported: i32,
    pub local_l1_cache_supported: i32,
    pub shared_mem_per_multiprocessor: u64,
    pub regs_per_multiprocessor: i32,
    pub managed_memory: i32,
    pub is_multi_gpu_board: i32,
    pub multi_gpu_board_group_id: i32,
    pub host_native_atomic_supported: i32,
    pub single_to_double_precision_perf_ratio: i32,
    pub pageable_memory_access: i32,
    pub concurrent_managed_access: i32,
    pub compute_preemption_supported: i32,
    pub can_use_host_pointer_for_registered_mem: i32,
    pub cooperative_launch: i32,
    pub cooperative_multi_device_launch: i32,
    pub shared_mem_per_block_optin: u64,
    pub pageable_memory_access_uses_host_page_tables: i32,
    pub direct_managed_mem_access_from_host: i32,
    pub max_blocks_per_multi_processor: i32,
    pub access_policy_max_window_size: i32,
    pub reserved_shared_mem_per_block: u64,
    pub host_register_supported: i32,
    pub sparse_hip_array_supported: i32,
    pub host_register_read_only_supported: i32,
    pub timeline_semaphore_interop_supported: i32,
    pub memory_pools_supported: i32,
    pub gpu_direct_rdma: [i32; 3],
    pub memory_pool_supported_handle_types: u32,
    pub deferred_mapping_hip_array_supported: i32,
    pub ipc_event_supported: i32,
    pub cluster_launch: i32,
    pub unified_function_pointers: i32,
    pub reserved: [i32; 63],
    pub hip_reserved: [i32; 32],
    pub gcn_arch_name: [u8; 256],
    pub max_shared_memory_per_multi_processor: u64,
    pub clock_instruction_rate: i32,
    pub arch: u32,
    pub hdp_mem_flush_cntl: u64,
    pub hdp_reg_flush_cntl: u64,
    pub unmatched: [i32; 4],
    pub is_large_bar: i32,
    pub asic_revision: i32,
}

/// `hipDeviceProp_t` of HIP 5, which the plain symbol `hipGetDeviceProperties` still gives.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct PropertiesR0000 {
    pub name: [u8; 256],
    pub total_global_mem: u64,
    pub shared_mem_per_block: u64,
    pub regs_per_block: i32,
    pub warp_size: i32,
    pub max_threads_per_block: i32,
    pub max_threads_dim: [i32; 3],
    pub max_grid_size: [i32; 3],
    pub clock_rate: i32,
    pub memory_clock_rate: i32,
    pub memory_bus_width: i32,
    pub total_const_mem: u64,
    pub major: i32,
    pub minor: i32,
    pub multi_processor_count: i32,
    pub l2_cache_size: i32,
    pub max_threads_per_multi_processor: i32,
    pub compute_mode: i32,
    pub clock_instruction_rate: i32,
    pub arch: u32,
    pub concurrent_kernels: i32,
    pub pci_domain_id: i32,
    pub pci_bus_id: i32,
    pub pci_device_id: i32,
    pub max_shared_memory_per_multi_processor: u64,
    pub is_multi_gpu_board: i32,
    pub can_map_host_memory: i32,
    pub gcn_arch: i32,
    pub gcn_arch_name: [u8; 256],
    pub integrated: i32,
    pub cooperative_launch: i32,
    pub cooperative_multi_device_launch: i32,
    /// Limits of textures: there are none.
    pub images: [i32; 7],
    pub pad0: i32,
    pub hdp_mem_flush_cntl: u64,
    pub hdp_reg_flush_cntl: u64,
    pub mem_pitch: u64,
    pub texture_alignment: u64,
    pub texture_pitch_alignment: u64,
    pub kernel_exec_timeout_enabled: i32,
    pub ecc_enabled: i32,
    pub tcc_driver: i32,
    pub unmatched: [i32; 4],
    pub is_large_bar: i32,
    pub asic_revision: i32,
    pub managed_memory: i32,
    pub direct_managed_mem_access_from_host: i32,
    pub concurrent_managed_access: i32,
    pub pageable_memory_access: i32,
    pub pageable_memory_access_uses_host_page_tables: i32,
}

/// `hipPointerAttribute_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct PointerAttributes {
    pub memory_type: i32,
    pub device: i32,
    pub device_pointer: u64,
    pub host_pointer: u64,
    pub is_managed: i32,
    pub allocation_flags: u32,
}

/// `hipMemoryType` of HIP 6 and 7.
pub(crate) mod memory_type {
    pub const UNREGISTERED: i32 = 0;
    pub const HOST: i32 = 1;
    pub const DEVICE: i32 = 2;
    pub const MANAGED: i32 = 3;
    pub const UNIFIED: i32 = 11;
}

/// `hipFuncAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FuncAttributes {
    pub binary_version: i32,
    pub cache_mode_ca: i32,
    pub const_size_bytes: u64,
    pub local_size_bytes: u64,
    pub max_dynamic_shared_size_bytes: i32,
    pub max_threads_per_block: i32,
    pub num_regs: i32,
    pub preferred_shmem_carveout: i32,
    pub ptx_version: i32,
    pub pad: i32,
    pub shared_size_bytes: u64,
}

/// `hip_Memcpy2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Memcpy2D {
    pub src: Side2D,
    pub dst: Side2D,
    pub width_in_bytes: u64,
    pub height: u64,
}

/// One side of [`Memcpy2D`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Side2D {
    pub x_in_bytes: u64,
    pub y: u64,
    pub memory_type: i32,
    pub pad: i32,
    pub host: u64,
    pub device: u64,
    pub array: u64,
    pub pitch: u64,
}

/// `hipPos` and `hipExtent`; x and width are bytes of linear memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct Size3 {
    pub x: u64,
    pub y: u64,
    pub z: u64,
}

/// `hipPitchedPtr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct PitchedPtr {
    pub ptr: u64,
    pub pitch: u64,
    pub xsize: u64,
    pub ysize: u64,
}

/// `hipMemcpy3DParms`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct Memcpy3D {
    pub src_array: u64,
    pub src_pos: Size3,
    pub src_ptr: PitchedPtr,
    pub dst_array: u64,
    pub dst_pos: Size3,
    pub dst_ptr: PitchedPtr,
    pub extent: Size3,
    pub kind: i32,
    pub pad: i32,
}

/// `HIP_MEMCPY3D`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct DriverMemcpy3D {
    pub src: Side3D,
    pub dst: Side3D,
    pub width_in_bytes: u64,
    pub height: u64,
    pub depth: u64,
}

/// One side of [`DriverMemcpy3D`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct Side3D {
    pub x_in_bytes: u64,
    pub y: u64,
    pub z: u64,
    pub lod: u64,
    pub memory_type: i32,
    pub pad: i32,
    pub host: u64,
    pub device: u64,
    pub array: u64,
    pub pitch: u64,
    pub height: u64,
}

/// `hipMemsetParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct MemsetParams {
    pub dst: u64,
    pub element_size: u32,
    pub pad0: u32,
    pub height: u64,
    pub pitch: u64,
    pub value: u32,
    pub pad1: u32,
    pub width: u64,
}

/// `HIP_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct DriverMemsetParams {
    pub dst: u64,
    pub pitch: u64,
    pub value: u32,
    pub element_size: u32,
    pub width: u64,
    pub height: u64,
}

/// `hipHostNodeParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct HostNodeParams {
    pub function: u64,
    pub data: u64,
}

/// `hipKernelNodeParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct KernelNodeParams {
    pub block: Dim3,
    pub pad0: u32,
    pub extra: u64,
    pub function: u64,
    pub grid: Dim3,
    pub pad1: u32,
    pub params: u64,
    pub dynamic_lds: u32,
    pub pad2: u32,
}

/// `hipLaunchParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LaunchParams {
    pub function: u64,
    pub grid: Dim3,
    pub block: Dim3,
    pub params: u64,
    pub dynamic_lds: u64,
    pub stream: u64,
}

/// `hipMemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MemPoolProps {
    pub allocation_type: i32,
    pub handle_types: i32,
    pub location_type: i32,
    pub location_id: i32,
    pub security: u64,
    pub max_size: u64,
    pub reserved: [u8; 56],
}

/// `hipMemAllocNodeParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct MemAllocNodeParams {
    pub pool: MemPoolProps,
    pub access: u64,
    pub access_count: u64,
    pub bytes: u64,
    pub ptr: u64,
}

/// `hipGraphNodeParams`; `node` is a union.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GraphNodeParams {
    pub node_type: i32,
    pub reserved0: [i32; 3],
    pub node: [u64; 29],
    pub reserved1: u64,
}

/// `hipGraphInstantiateParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct InstantiateParams {
    pub error_node: u64,
    pub flags: u64,
    pub result: i32,
    pub pad: i32,
    pub upload_stream: u64,
}

/// `hipLaunchAttributeValue`: a union of an `int` and a `hipAccessPolicyWindow`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub(crate) struct LaunchAttribute {
    /// Base pointer; its low half is the `int`.
    pub base: u64,
    pub hit: i32,
    pub hit_ratio: f32,
    pub miss: i32,
    pub pad: i32,
    pub bytes: u64,
}

/// The wrapper that clang puts around an embedded offload bundle.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FatBinaryWrapper {
    pub magic: u32,
    pub version: u32,
    pub binary: u64,
    pub unused: u64,
}

const _: () = {
    type P = PropertiesR0600;
    assert!(size_of::<P>() == 1472);
    assert!(offset_of!(P, total_global_mem) == 288);
    assert!(offset_of!(P, regs_per_block) == 304);
    assert!(offset_of!(P, max_threads_per_block) == 320);
    assert!(offset_of!(P, clock_rate) == 348);
    assert!(offset_of!(P, major) == 360);
    assert!(offset_of!(P, texture_alignment) == 368);
    assert!(offset_of!(P, multi_processor_count) == 388);
    assert!(offset_of!(P, surface_alignment) == 568);
    assert!(offset_of!(P, pci_bus_id) == 584);
    assert!(offset_of!(P, l2_cache_size) == 616);
    assert!(offset_of!(P, shared_mem_per_multiprocessor) == 640);
    assert!(offset_of!(P, managed_memory) == 652);
    assert!(offset_of!(P, cooperative_launch) == 688);
    assert!(offset_of!(P, shared_mem_per_block_optin) == 696);
    assert!(offset_of!(P, reserved_shared_mem_per_block) == 720);
    assert!(offset_of!(P, memory_pools_supported) == 744);
    assert!(offset_of!(P, unified_function_pointers) == 776);
    assert!(offset_of!(P, hip_reserved) == 1032);
    assert!(offset_of!(P, gcn_arch_name) == 1160);
    assert!(offset_of!(P, arch) == 1428);
    assert!(offset_of!(P, asic_revision) == 1468);
};

const _: () = {
    type P = PropertiesR0000;
    assert!(size_of::<P>() == 792);
    assert!(offset_of!(P, total_const_mem) == 320);
    assert!(offset_of!(P, multi_processor_count) == 336);
    assert!(offset_of!(P, arch) == 356);
    assert!(offset_of!(P, pci_bus_id) == 368);
    assert!(offset_of!(P, max_shared_memory_per_multi_processor) == 376);
    assert!(offset_of!(P, gcn_arch_name) == 396);
    assert!(offset_of!(P, cooperative_launch) == 656);
    assert!(offset_of!(P, hdp_mem_flush_cntl) == 696);
    assert!(offset_of!(P, texture_alignment) == 720);
    assert!(offset_of!(P, managed_memory) == 772);
};

const _: () = {
    assert!(size_of::<Dim3>() == 12);
    assert!(size_of::<PointerAttributes>() == 32);
    assert!(size_of::<FuncAttributes>() == 56);
    assert!(size_of::<Memcpy2D>() == 128);
    assert!(size_of::<Memcpy3D>() == 160);
    assert!(size_of::<DriverMemcpy3D>() == 184);
    assert!(size_of::<MemsetParams>() == 48);
    assert!(size_of::<DriverMemsetParams>() == 40);
    assert!(size_of::<KernelNodeParams>() == 64);
    assert!(size_of::<LaunchParams>() == 56);
    assert!(size_of::<MemAllocNodeParams>() == 120);
    assert!(size_of::<GraphNodeParams>() == 256);
    assert!(size_of::<LaunchAttribute>() == 32);
    assert!(size_of::<FatBinaryWrapper>() == 24);
};
