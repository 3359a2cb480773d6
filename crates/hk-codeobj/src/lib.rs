//! Reader of AMDGPU code objects: kernels, resources, occupancy.
