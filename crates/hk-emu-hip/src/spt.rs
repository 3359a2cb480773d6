//! Functions that take the calling thread's own stream for the null stream: what programs call that are compiled for
//! such a default stream.

use std::ffi::{c_int, c_uint};

use crate::abi::Dim3;
use crate::error::{HipError, Result, SUCCESS};
use crate::memory::*;
use crate::register::*;
use crate::runtime::api;
use crate::stream::*;

fn own(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

fn result(code: c_int) -> Result {
    if code == SUCCESS { Ok(()) } else { Err(HipError(code)) }
}

api! {
    fn hipEventRecord_spt(event: u64, on: u64) { result(hipEventRecord(event, own(on))) }

    fn hipLaunchHostFunc_spt(on: u64, function: Option<HostFunction>, data: u64) {
        result(hipLaunchHostFunc(own(on), function, data))
    }

    fn hipLaunchKernel_spt(function: u64, grid: Dim3, block: Dim3, params: u64, dynamic_lds: u64, on: u64) {
        result(hipLaunchKernel(function, grid, block, params, dynamic_lds, own(on)))
    }

    fn hipMemcpy_spt(dst: u64, src: u64, bytes: u64, kind: c_int) { result(hipMemcpy(dst, src, bytes, kind)) }

    fn hipMemcpyAsync_spt(dst: u64, src: u64, bytes: u64, kind: c_int, on: u64) {
        result(hipMemcpyAsync(dst, src, bytes, kind, own(on)))
    }

    fn hipMemcpy2D_spt(dst: u64, dst_pitch: u64, src: u64, src_pitch: u64, width: u64, height: u64, kind: c_int) {
        result(hipMemcpy2D(dst, dst_pitch, src, src_pitch, width, height, kind))
    }

    fn hipMemcpy2DAsync_spt(
        dst: u64,
        dst_pitch: u64,
        src: u64,
        src_pitch: u64,
        width: u64,
        height: u64,
        kind: c_int,
        on: u64,
    ) {
        result(hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, own(on)))
    }

    fn hipMemcpyFromSymbol_spt(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int) {
        result(hipMemcpyFromSymbol(dst, symbol, bytes, offset, kind))
    }

    fn hipMemcpyFromSymbolAsync_spt(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        result(hipMemcpyFromSymbolAsync(dst, symbol, bytes, offset, kind, own(on)))
    }

    fn hipMemcpyToSymbol_spt(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int) {
        result(hipMemcpyToSymbol(symbol, src, bytes, offset, kind))
    }

    fn hipMemcpyToSymbolAsync_spt(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        result(hipMemcpyToSymbolAsync(symbol, src, bytes, offset, kind, own(on)))
    }

    fn hipMemset_spt(dst: u64, value: c_int, bytes: u64) { result(hipMemset(dst, value, bytes)) }

    fn hipMemsetAsync_spt(dst: u64, value: c_int, bytes: u64, on: u64) {
        result(hipMemsetAsync(dst, value, bytes, own(on)))
    }

    fn hipMemset2D_spt(dst: u64, pitch: u64, value: c_int, width: u64, height: u64) {
        result(hipMemset2D(dst, pitch, value, width, height))
    }

    fn hipMemset2DAsync_spt(dst: u64, pitch: u64, value: c_int, width: u64, height: u64, on: u64) {
        result(hipMemset2DAsync(dst, pitch, value, width, height, own(on)))
    }

    fn hipStreamAddCallback_spt(on: u64, function: Option<Callback>, data: u64, flags: c_uint) {
        result(hipStreamAddCallback(own(on), function, data, flags))
    }

    fn hipStreamGetFlags_spt(on: u64, flags: *mut c_uint) { result(hipStreamGetFlags(own(on), flags)) }
    fn hipStreamGetPriority_spt(on: u64, priority: *mut c_int) { result(hipStreamGetPriority(own(on), priority)) }
    fn hipStreamIsCapturing_spt(on: u64, status: *mut c_int) { result(hipStreamIsCapturing(own(on), status)) }
    fn hipStreamQuery_spt(on: u64) { result(hipStreamQuery(own(on))) }
    fn hipStreamSynchronize_spt(on: u64) { result(hipStreamSynchronize(own(on))) }

    fn hipStreamWaitEvent_spt(on: u64, event: u64, flags: c_uint) {
        result(hipStreamWaitEvent(own(on), event, flags))
    }
}
