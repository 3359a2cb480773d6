//! Structures that cross the ABI, by the published headers of HIP 5 to 7. Sizes and offsets are checked below.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

/// `dim3`, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
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
    assert!(size_of::<FatBinaryWrapper>() == 24);
};
