//! Graphs, and page-locked host memory, without kernels: on an emulated device that completes work late, and on those that
//! `HK_TEST_DEVICES` names (`cuda:0`).
#![cfg(feature = "emu")]

use hk_core::{Device, Error, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn streams() -> Vec<Stream> {
    let named = std::env::var("HK_TEST_DEVICES").unwrap_or_default();
    let specs = ["emu:gfx942?delay_ms=2"].into_iter().chain(named.split(',').filter(|s| !s.is_empty()));
    specs.map(|spec| Device::open(spec.trim()).unwrap().create_stream().unwrap()).collect()
}

#[test]
fn a_graph_replays_captured_work_in_order() {
    for stream in streams() {
        let mut a = stream.upload(&[1i32; 100]).unwrap();
        let mut b = stream.upload(&[2i32; 100]).unwrap();
        let mut c = stream.upload(&[3i32; 100]).unwrap();
        let graph = stream
            .capture(|| {
                stream.copy(&a, &mut c)?; // a's value before the fill
                stream.fill(&mut a, 7)?;
                stream.copy(&a, &mut b)
            })
            .unwrap();
        assert_eq!(stream.download(&c).unwrap(), [3; 100], "noted, not done");
        for before in [1, 7] {
            // SAFETY: a, b and c are alive, and nothing else uses them.
            unsafe { graph.launch(&stream).unwrap() };
            assert_eq!(stream.download(&c).unwrap(), [before; 100]);
            assert_eq!(stream.download(&b).unwrap(), [7; 100]);
        }
        // On another stream, and from a clone.
        let other = stream.device().create_stream().unwrap();
        stream.fill(&mut a, 5).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: as above; the other stream has nothing to do.
        unsafe { graph.clone().launch(&other).unwrap() };
        other.synchronize().unwrap();
        assert_eq!(stream.download(&c).unwrap(), [5; 100]);
    }
}

#[test]
fn a_graph_is_of_its_device() {
    let [a, b] =
        ["emu:gfx942", "emu:gfx950"].map(|spec| Device::open(spec).unwrap().create_stream().unwrap());
    let graph = a.capture(|| Ok(())).unwrap();
    // SAFETY: there is nothing in it.
    let (same, other) = unsafe { (graph.launch(&a), graph.launch(&b)) };
    assert!(same.is_ok());
    assert!(matches!(other, Err(Error::DeviceMismatch { op: "Graph::launch", arg: "graph", .. })));
}

#[test]
fn a_capture_refuses_what_a_graph_cannot_hold() {
    for stream in streams() {
        let home = stream.device().create_stream().unwrap();
        let foreign = home.upload(&[1f32; 4]).unwrap();
        let mut x = stream.upload(&[1f32; 4]).unwrap();
        let y = stream.upload(&[2f32; 4]).unwrap();
        let mut host = stream.device().alloc_host::<f32>(4).unwrap();
        let event = stream.record().unwrap();
        let mut refused = Vec::new();
        stream
            .capture(|| {
                refused = vec![
                    ("Stream::synchronize", stream.synchronize()),
                    ("Stream::read", stream.download(&x).map(drop)),
                    ("Stream::write", stream.write(&mut x, &[3.0; 4])),
                    ("alloc", stream.upload(&[1f32; 4]).map(drop)),
                    ("alloc", stream.alloc_zeroed::<f32>(4).map(drop)),
                    ("Stream::record", stream.record().map(drop)),
                    ("Stream::wait", stream.wait(&event)),
                    ("Stream::write_async", stream.write_async(&mut x, &mut host)),
                    ("Stream::read_async", stream.read_async(&x, &mut host)),
                    ("Stream::capture", stream.capture(|| Ok(())).map(drop)),
                    ("Stream::copy", stream.copy(&foreign, &mut x)),
                ];
                Ok(())
            })
            .unwrap();
        for (name, result) in refused {
            assert!(
                matches!(&result, Err(Error::Unsupported { op, .. }) if *op == name),
                "{name}: {result:?}"
            );
        }
        let text = "Stream::wait: this call during a capture is not supported: a graph holds launches, copies on the \
                    device and fills";
        assert_eq!(stream.capture(|| stream.wait(&event)).unwrap_err().to_string(), text);
        // The stream is as it was.
        stream.copy(&y, &mut x).unwrap();
        assert_eq!(stream.download(&x).unwrap(), [2.0; 4]);
    }
}

#[test]
fn a_capture_ends_whatever_happens_within() {
    for stream in streams() {
        let mut x = stream.upload(&[1f32; 4]).unwrap();
        let error = stream.capture(|| {
            stream.fill(&mut x, 2.0)?;
            Err(Error::Argument { op: "test", arg: "x", got: "a".into(), want: "b".into() })
        });
        assert!(matches!(error, Err(Error::Argument { op: "test", .. })));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            stream.capture(|| {
                stream.fill(&mut x, 3.0)?;
                panic!("within")
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(stream.download(&x).unwrap(), [1.0; 4]);
    }
}

#[test]
fn memory_dropped_during_a_capture_is_released_after_it() {
    for stream in streams() {
        let other = stream.device().create_stream().unwrap();
        let mut mine = Some(stream.upload(&[1f32; 100]).unwrap());
        let mut shared = Some(other.upload(&[2f32; 100]).unwrap());
        assert_eq!(stream.download(shared.as_ref().unwrap()).unwrap(), [2.0; 100]);
        let graph = stream.capture(|| {
            (mine, shared) = (None, None);
            Ok(())
        });
        // SAFETY: there is nothing in it.
        unsafe { graph.unwrap().launch(&stream).unwrap() };
        assert!(mine.is_none() && shared.is_none());
        stream.synchronize().unwrap();
        other.synchronize().unwrap();
    }
}

#[test]
fn page_locked_memory_is_copied_in_order() {
    for stream in streams() {
        let mut host = stream.device().alloc_host::<i32>(1000).unwrap();
        assert_eq!((host.len(), host.elements().unwrap().to_vec()), (1000, vec![0; 1000]));
        let data: Vec<i32> = (0..1000).collect();
        host.elements().unwrap().copy_from_slice(&data);
        let mut x = stream.alloc_zeroed::<i32>(1000).unwrap();
        let mut y = stream.alloc_zeroed::<i32>(1000).unwrap();
        stream.write_async(&mut x, &mut host).unwrap();
        // Not before the first copy is done.
        host.elements().unwrap().fill(-1);
        stream.copy(&x, &mut y).unwrap();
        let mut back = stream.device().alloc_host::<i32>(1000).unwrap();
        stream.read_async(&y, &mut back).unwrap();
        assert_eq!(back.elements().unwrap(), data);
        // A copy on another stream comes behind the last one of the same memory.
        let other = stream.device().create_stream().unwrap();
        let mut z = other.alloc_zeroed::<i32>(1000).unwrap();
        stream.read_async(&y, &mut host).unwrap();
        other.write_async(&mut z, &mut host).unwrap();
        drop(host); // waits
        assert_eq!(other.download(&z).unwrap(), data);
    }
}

#[test]
fn copies_of_page_locked_memory_are_checked() {
    let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
    let other = Device::open("emu:gfx950").unwrap();
    let mut x = stream.alloc_zeroed::<f32>(4).unwrap();
    let mut short = stream.device().alloc_host::<f32>(3).unwrap();
    let mut foreign = other.alloc_host::<f32>(4).unwrap();
    let results = [
        ("Stream::write_async", stream.write_async(&mut x, &mut short)),
        ("Stream::read_async", stream.read_async(&x, &mut short)),
    ];
    for (name, result) in results {
        assert_eq!(
            result.unwrap_err().to_string(),
            format!("{name}: host: shape [3], expected [4], as the buffer")
        );
    }
    let mismatch = stream.write_async(&mut x, &mut foreign).unwrap_err().to_string();
    assert_eq!(mismatch, "Stream::write_async: host is on device emu:gfx950, the stream is on emu:gfx942");
    assert!(matches!(stream.device().alloc_host::<f32>(usize::MAX), Err(Error::TooLarge { .. })));
    let mut none = stream.device().alloc_host::<f32>(0).unwrap();
    assert!(none.is_empty() && none.elements().unwrap().is_empty());
    let mut nothing = stream.alloc_zeroed::<f32>(0).unwrap();
    stream.write_async(&mut nothing, &mut none).unwrap();
}
