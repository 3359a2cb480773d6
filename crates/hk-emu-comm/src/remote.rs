//! Ranks of other processes: a request is a connection to the process of the unique id, which does what is asked and answers. What is longer
//! than a page is in files in memory, which each side opens while the other one waits; the connection says where.

use crate::Failure;
use crate::blob::Blob;
use crate::hub::{Caller, Request};
use hk_emu::FilePlace;
use std::io;
use std::sync::Arc;

/// Does what a rank asks for in the process of that name.
pub(crate) fn ask(process: &[u8; 16], caller: &Caller, request: &Request) -> Result<Vec<Arc<[u8]>>, Failure> {
    let lost = |error: io::Error| Failure::Transport(error.to_string());
    let encoded = encode_request(caller, request).map_err(lost)?;
    // Bytes are read before the connection ends, with which the other process lets go of them.
    let read = |answer: &[u8]| {
        let answer = decode_answer(&mut Reader(answer));
        answer.map(|answer| answer.and_then(|blobs| blobs.iter().map(|b| b.bytes().map_err(lost)).collect()))
    };
    let answer = socket::exchange(process, &encoded, read).map_err(lost)?;
    answer.ok_or_else(|| Failure::Transport("a wrong answer".into()))?
}

/// Answers ranks of other processes from now on; again is nothing.
pub(crate) fn serve(process: &[u8; 16]) -> Result<(), Failure> {
    socket::serve(process, answer).map_err(|error| Failure::Transport(error.to_string()))
}

/// The answer, and what has to stay until it is read.
fn answer(request: &[u8]) -> (Vec<u8>, Vec<Blob>) {
    let result = match decode_request(&mut Reader(request)) {
        Some((caller, request)) => crate::hub::handle(&caller, request),
        None => Err(Failure::Invalid("a wrong request".into())),
    };
    let encoded = encode_answer(&result).or_else(|error| {
        let lost = Failure::Transport(error.to_string());
        encode_answer(&Err(lost))
    });
    (encoded.unwrap_or_default(), result.unwrap_or_default())
}

#[cfg(target_os = "linux")]
mod socket {
    use std::fmt::Write as _;
    use std::io::{self, Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::sync::Mutex;
    use std::sync::PoisonError;

    /// In the abstract namespace: it goes with the process.
    fn address(process: &[u8; 16]) -> io::Result<SocketAddr> {
        let mut name = "hk-rccl-".to_owned();
        for byte in process {
            let _ = write!(name, "{byte:02x}");
        }
        SocketAddr::from_abstract_name(name)
    }

    pub fn exchange<R>(process: &[u8; 16], request: &[u8], read: impl FnOnce(&[u8]) -> R) -> io::Result<R> {
        let mut stream = UnixStream::connect_addr(&address(process)?)?;
        send(&mut stream, request)?;
        let answer = receive(&mut stream)?;
        Ok(read(&answer))
    }

    /// A message behind its length: the connection stays open behind it.
    fn send(stream: &mut UnixStream, message: &[u8]) -> io::Result<()> {
        stream.write_all(&(message.len() as u64).to_le_bytes())?;
        stream.write_all(message)
    }

    fn receive(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
        let mut len = [0; 8];
        stream.read_exact(&mut len)?;
        let len = u64::from_le_bytes(len);
        let mut message = vec![];
        stream.take(len).read_to_end(&mut message)?;
        if message.len() as u64 != len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(message)
    }

    pub fn serve<K: 'static>(process: &[u8; 16], answer: fn(&[u8]) -> (Vec<u8>, K)) -> io::Result<()> {
        static SERVES: Mutex<bool> = Mutex::new(false);
        let mut serves = SERVES.lock().unwrap_or_else(PoisonError::into_inner);
        if *serves {
            return Ok(());
        }
        let listener = UnixListener::bind_addr(&address(process)?)?;
        let one = move |mut stream: UnixStream| -> io::Result<()> {
            let request = receive(&mut stream)?;
            let (message, kept) = answer(&request);
            send(&mut stream, &message)?;
            // Until the rank has read the answer, and what it names.
            stream.read_to_end(&mut vec![])?;
            drop(kept);
            Ok(())
        };
        // Each with a thread: an answer may have to wait for the requests of others.
        let all = move || {
            for stream in listener.incoming().flatten() {
                // A rank that is gone wants no answer, and one that gets none reports it.
                let _ = std::thread::Builder::new().name("hk-emu-comm".into()).spawn(move || one(stream));
            }
        };
        std::thread::Builder::new().name("hk-emu-comm server".into()).spawn(all)?;
        *serves = true;
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
mod socket {
    use std::io;

    pub fn exchange<R>(_: &[u8; 16], _: &[u8], _: impl FnOnce(&[u8]) -> R) -> io::Result<R> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "ranks in several processes are for Linux"))
    }

    /// Ranks of this process need no socket.
    pub fn serve<K: 'static>(_: &[u8; 16], _: fn(&[u8]) -> (Vec<u8>, K)) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of a blob that go through the socket, at most.
const INLINE: usize = 4096;
/// Where a blob's length is, that it is elsewhere.
const ELSEWHERE: u64 = u64::MAX;

/// Numbers and blobs, little-endian, each blob behind its length.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn index(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let (bytes, rest) = self.index().and_then(|len| self.0.split_at_checked(len))?;
        self.0 = rest;
        Some(bytes)
    }

    fn blob(&mut self) -> Option<Blob> {
        let mut ahead = Reader(self.0);
        if ahead.number()? != ELSEWHERE {
            return self.bytes().map(Blob::from);
        }
        let mut place = [0; 5];
        for number in &mut place {
            *number = ahead.number()?;
        }
        self.0 = ahead.0;
        Blob::open(&FilePlace::from_numbers(place)?).ok()
    }

    fn text(&mut self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

fn put(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_blob(out: &mut Vec<u8>, blob: &Blob) -> io::Result<()> {
    if blob.len() <= INLINE {
        put_bytes(out, &blob.bytes()?);
        return Ok(());
    }
    put(out, ELSEWHERE);
    blob.place()?.numbers().into_iter().for_each(|number| put(out, number));
    Ok(())
}

fn encode_request(caller: &Caller, request: &Request) -> io::Result<Vec<u8>> {
    let mut out = vec![];
    put_bytes(&mut out, &caller.key);
    put(&mut out, caller.rank as u64);
    // One more than milliseconds, 0 for none.
    let ms = caller.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX).saturating_add(1));
    put(&mut out, ms.unwrap_or(0));
    let none = || Blob::from([]);
    let (tag, number, blob): (u64, u64, Blob) = match request {
        Request::Join(world) => (0, *world as u64, none()),
        Request::Exchange(blob) => (1, 0, blob.clone()),
        Request::Post(to, blob) => (2, *to as u64, blob.clone()),
        Request::Take(from) => (3, *from as u64, none()),
        Request::Taken(to, number) => (4, *to as u64, Blob::from(number.to_le_bytes())),
        Request::Abort => (5, 0, none()),
        Request::Leave => (6, 0, none()),
    };
    put(&mut out, tag);
    put(&mut out, number);
    put_blob(&mut out, &blob)?;
    Ok(out)
}

fn decode_request(reader: &mut Reader) -> Option<(Caller, Request)> {
    let (key, rank) = (reader.bytes()?.to_vec(), reader.index()?);
    let timeout = reader.number()?.checked_sub(1).map(std::time::Duration::from_millis);
    let (tag, number, blob) = (reader.number()?, reader.index()?, reader.blob()?);
    let request = match tag {
        0 => Request::Join(number),
        1 => Request::Exchange(blob),
        2 => Request::Post(number, blob),
        3 => Request::Take(number),
        4 => Request::Taken(number, u64::from_le_bytes(blob.bytes().ok()?[..].try_into().ok()?)),
        5 => Request::Abort,
        6 => Request::Leave,
        _ => return None,
    };
    Some((Caller { key, rank, timeout }, request))
}

fn encode_answer(answer: &Result<Vec<Blob>, Failure>) -> io::Result<Vec<u8>> {
    let mut out = vec![];
    match answer {
        Ok(blobs) => {
            put(&mut out, 0);
            put(&mut out, blobs.len() as u64);
            blobs.iter().try_for_each(|blob| put_blob(&mut out, blob))?;
        }
        Err(failure) => {
            let (tag, numbers, texts): (u64, [usize; 2], [&str; 2]) = match failure {
                Failure::Timeout { missing } => (1, [*missing, 0], [""; 2]),
                Failure::Aborted => (2, [0; 2], [""; 2]),
                Failure::Mismatch { rank, own, other, other_call } => (3, [*rank, *other], [own, other_call]),
                Failure::Left { rank } => (4, [*rank, 0], [""; 2]),
                Failure::Invalid(text) => (5, [0; 2], [text, ""]),
                Failure::Memory(text) => (6, [0; 2], [text, ""]),
                Failure::Transport(text) => (7, [0; 2], [text, ""]),
            };
            put(&mut out, tag);
            numbers.into_iter().for_each(|number| put(&mut out, number as u64));
            texts.into_iter().for_each(|text| put_bytes(&mut out, text.as_bytes()));
        }
    }
    Ok(out)
}

fn decode_answer(reader: &mut Reader) -> Option<Result<Vec<Blob>, Failure>> {
    let tag = reader.number()?;
    if tag == 0 {
        let blobs = (0..reader.number()?).map(|_| reader.blob()).collect::<Option<_>>()?;
        return Some(Ok(blobs));
    }
    let (rank, other) = (reader.index()?, reader.index()?);
    let (own, other_call) = (reader.text()?, reader.text()?);
    Some(Err(match tag {
        1 => Failure::Timeout { missing: rank },
        2 => Failure::Aborted,
        3 => Failure::Mismatch { rank, own, other, other_call },
        4 => Failure::Left { rank },
        5 => Failure::Invalid(own),
        6 => Failure::Memory(own),
        7 => Failure::Transport(own),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    #[cfg(target_os = "linux")]
    fn messages_are_read_as_they_were_written() {
        let caller = |timeout| Caller { key: b"key".into(), rank: 3, timeout };
        let blob = Blob::from([1u8, 2, 3]);
        let long = Blob::from(vec![5; INLINE + 1]);
        for request in [
            Request::Join(4),
            Request::Exchange(blob.clone()),
            Request::Exchange(long.clone()),
            Request::Post(2, blob.clone()),
            Request::Take(1),
            Request::Taken(1, 9),
            Request::Abort,
            Request::Leave,
        ] {
            for timeout in [None, Some(Duration::ZERO), Some(Duration::from_secs(5))] {
                let bytes = encode_request(&caller(timeout), &request).unwrap();
                assert!(bytes.len() < 200);
                assert_eq!(decode_request(&mut Reader(&bytes)), Some((caller(timeout), request.clone())));
                assert_eq!(decode_request(&mut Reader(&bytes[..bytes.len() - 1])), None);
            }
        }
        let mismatch = Failure::Mismatch { rank: 1, own: "a".into(), other: 2, other_call: "b".into() };
        for answer in [
            Ok(vec![]),
            Ok(vec![blob.clone(), Blob::from([]), long.clone()]),
            Err(Failure::Timeout { missing: 7 }),
            Err(Failure::Aborted),
            Err(mismatch),
            Err(Failure::Left { rank: 1 }),
            Err(Failure::Invalid("i".into())),
            Err(Failure::Memory("m".into())),
            Err(Failure::Transport("t".into())),
        ] {
            let bytes = encode_answer(&answer).unwrap();
            assert_eq!(decode_answer(&mut Reader(&bytes)), Some(answer));
        }
    }
}
