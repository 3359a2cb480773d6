//! Where ranks of several processes meet.

use hk_core::{Error, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Bytes of all ranks for all ranks, over TCP: a star with rank 0 in the middle. For what ranks of several processes exchange before they can
/// use the memory of each other ([`P2pComm::join`](crate::P2pComm::join)), and for a [`UniqueId`](crate::UniqueId).
#[derive(Debug)]
pub struct Rendezvous {
    rank: usize,
    timeout: Duration,
    /// On rank 0 of ranks 1, 2, ..; on the others of rank 0.
    peers: Vec<TcpStream>,
}

/// Bytes of a rank, at most.
const MAX_BYTES: usize = 1 << 20;
/// Ranks, at most.
const MAX_RANKS: usize = 1 << 16;
/// What rank 0 answers with where no rank is missing.
const COMPLETE: u64 = u64::MAX;

impl Rendezvous {
    /// Rank 0 of `world`, which the others find at the listener's address. Waits until they are there.
    ///
    /// # Errors
    /// [`Error::Argument`]: no ranks, too many, or the network fails. [`Error::Timeout`]: a rank did not come in time.
    pub fn host(listener: &TcpListener, world: usize, timeout: Duration) -> Result<Self> {
        const OP: &str = "Rendezvous::host";
        expect_world(OP, world, 0)?;
        let network = |error: io::Error| Error::argument(OP, "listener", error, "a network");
        let mut peers: Vec<Option<TcpStream>> = (1..world).map(|_| None).collect();
        let start = Instant::now();
        listener.set_nonblocking(true).map_err(network)?;
        while let Some(missing) = peers.iter().position(Option::is_none) {
            match listener.accept() {
                Ok((mut stream, _)) => {
                    let mut hello = || {
                        stream.set_nonblocking(false)?;
                        prepare(&stream, timeout)?;
                        Ok((read_number(&mut stream)?, read_number(&mut stream)?))
                    };
                    let hello: io::Result<(u64, u64)> = hello();
                    // Whoever says something else is no rank.
                    let Ok((rank, of)) = hello else { continue };
                    let place =
                        usize::try_from(rank).ok().and_then(|rank| peers.get_mut(rank.checked_sub(1)?));
                    if let Some(place @ None) = place
                        && of == world as u64
                    {
                        *place = Some(stream);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if start.elapsed() >= timeout {
                        return Err(Error::Timeout { op: OP, rank: 0, missing: missing + 1 });
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(network(error)),
            }
        }
        let _ = listener.set_nonblocking(false);
        Ok(Self { rank: 0, timeout, peers: peers.into_iter().flatten().collect() })
    }

    /// Another rank than 0. Tries to reach rank 0 until `timeout` is over.
    ///
    /// # Errors
    /// [`Error::Argument`]: no such rank, or rank 0 is not at `address`.
    pub fn join(address: impl ToSocketAddrs, world: usize, rank: usize, timeout: Duration) -> Result<Self> {
        const OP: &str = "Rendezvous::join";
        expect_world(OP, world, rank)?;
        if rank == 0 {
            return Err(Error::argument(OP, "rank", 0, "a rank above 0, which is the host"));
        }
        let start = Instant::now();
        loop {
            let attempt = || {
                let mut stream = TcpStream::connect(&address)?;
                // Rank 0 waits for others before it answers.
                prepare(&stream, timeout.saturating_mul(2))?;
                stream.write_all(&[(rank as u64).to_le_bytes(), (world as u64).to_le_bytes()].concat())?;
                Ok(stream)
            };
            let error: io::Error = match attempt() {
                Ok(stream) => return Ok(Self { rank, timeout, peers: vec![stream] }),
                Err(error) => error,
            };
            if start.elapsed() >= timeout || error.kind() == ErrorKind::InvalidInput {
                return Err(Error::argument(OP, "address", error, "the address of rank 0"));
            }
            std::thread::sleep(Duration::from_millis(20).min(timeout));
        }
    }

    /// The bytes of ranks 0, 1, .., on every rank. Waits for all of them.
    ///
    /// # Errors
    /// [`Error::TooLarge`]: more than 1 MiB. [`Error::Timeout`]: a rank did not call in time, or has left. After an error of one rank the others
    /// get one, too.
    pub fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        const OP: &str = "Rendezvous::all_gather";
        if bytes.len() > MAX_BYTES {
            return Err(Error::too_large(OP, "bytes", format!("{} bytes", bytes.len()), MAX_BYTES as u64));
        }
        let rank = self.rank;
        let missing = |missing| Error::Timeout { op: OP, rank, missing };
        if rank != 0 {
            let exchange = |stream: &mut TcpStream| {
                write_bytes(stream, bytes)?;
                match read_number(stream)? {
                    COMPLETE => {}
                    rank => return Ok(Err(rank)),
                }
                let world = usize::try_from(read_number(stream)?).unwrap_or(usize::MAX).min(MAX_RANKS);
                (0..world).map(|_| read_bytes(stream)).collect::<io::Result<_>>().map(Ok)
            };
            return match self.peers.first_mut().map(exchange) {
                Some(Ok(Ok(all))) => Ok(all),
                Some(Ok(Err(gone))) => Err(missing(usize::try_from(gone).unwrap_or(0))),
                _ => Err(missing(0)),
            };
        }
        let mut all = vec![bytes.to_vec()];
        let start = Instant::now();
        let mut gone = None;
        for (at, stream) in self.peers.iter_mut().enumerate() {
            let rest = self.timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            match stream.set_read_timeout(Some(rest)).and_then(|()| read_bytes(stream)) {
                Ok(bytes) => all.push(bytes),
                Err(_) => gone = gone.or(Some(at + 1)),
            }
        }
        let mut answer = gone.map_or(COMPLETE, |rank| rank as u64).to_le_bytes().to_vec();
        if gone.is_none() {
            answer.extend((all.len() as u64).to_le_bytes());
            for bytes in &all {
                answer.extend((bytes.len() as u64).to_le_bytes());
                answer.extend(bytes);
            }
        }
        for (at, stream) in self.peers.iter_mut().enumerate() {
            if stream.write_all(&answer).is_err() {
                gone = gone.or(Some(at + 1));
            }
        }
        gone.map_or(Ok(all), |rank| Err(missing(rank)))
    }
}

fn expect_world(op: &'static str, world: usize, rank: usize) -> Result<()> {
    if rank < world && world <= MAX_RANKS {
        return Ok(());
    }
    Err(Error::argument(op, "rank", format!("rank {rank} of {world}"), "a rank below world"))
}

fn prepare(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    let timeout = Some(timeout.max(Duration::from_millis(1)));
    stream.set_nodelay(true)?;
    stream.set_read_timeout(timeout)?;
    stream.set_write_timeout(timeout)
}

fn read_number(stream: &mut TcpStream) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn read_bytes(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let len = usize::try_from(read_number(stream)?).ok().filter(|len| *len <= MAX_BYTES);
    let mut bytes = vec![0; len.ok_or(ErrorKind::InvalidData)?];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn write_bytes(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(&[&(bytes.len() as u64).to_le_bytes(), bytes].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meet<R: Send>(world: usize, timeout_ms: u64, call: impl Fn(Rendezvous) -> R + Sync) -> Vec<R> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let timeout = Duration::from_millis(timeout_ms);
        let (listener, call) = (&listener, &call);
        std::thread::scope(|scope| {
            let rank = |rank| {
                scope.spawn(move || {
                    call(match rank {
                        0 => Rendezvous::host(listener, world, timeout).expect("all come"),
                        _ => Rendezvous::join(address, world, rank, timeout).expect("it is there"),
                    })
                })
            };
            let threads: Vec<_> = (0..world).map(rank).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn everybody_gets_the_bytes_of_all() {
        for world in [1, 2, 5] {
            let results = meet(world, 20_000, |mut own| {
                let first = own.all_gather(&vec![own.rank as u8; own.rank]).expect("all call");
                (first, own.all_gather(&[]).expect("all call again"))
            });
            let want: Vec<Vec<u8>> = (0..world).map(|rank| vec![rank as u8; rank]).collect();
            assert!(
                results
                    .iter()
                    .all(|(first, empty)| *first == want && *empty == vec![Vec::<u8>::new(); world])
            );
        }
    }

    #[test]
    fn a_rank_that_does_not_call_is_named() {
        for silent in [0, 2] {
            let over = std::sync::Barrier::new(3);
            let results = meet(3, 1000, |mut own| {
                let error = if own.rank == silent { None } else { own.all_gather(&[1]).err() };
                over.wait();
                error
            });
            for (rank, error) in results.into_iter().enumerate().filter(|(rank, _)| *rank != silent) {
                let want = Error::Timeout { op: "Rendezvous::all_gather", rank, missing: silent };
                assert_eq!(error, Some(want));
            }
        }
    }

    #[test]
    fn wrong_ranks_and_addresses_are_errors() {
        let short = Duration::from_millis(20);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let error = Rendezvous::host(&listener, 2, short).expect_err("nobody joins");
        assert_eq!(error, Error::Timeout { op: "Rendezvous::host", rank: 0, missing: 1 });
        let address = listener.local_addr().expect("an address");
        drop(listener);
        for (world, rank, arg) in [(2, 2, "rank"), (2, 0, "rank"), (2, 1, "address")] {
            let error = Rendezvous::join(address, world, rank, short).expect_err("wrong").to_string();
            assert!(error.contains(&format!("Rendezvous::join: {arg}")), "{error}");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let error = Rendezvous::host(&listener, 0, short).expect_err("no ranks").to_string();
        assert!(error.contains("rank 0 of 0"), "{error}");
        let error = Rendezvous::host(&listener, 1, short).expect("alone").all_gather(&vec![0; MAX_BYTES + 1]);
        assert!(matches!(error, Err(Error::TooLarge { .. })), "{error:?}");
    }
}
