//! The socket that training processes connect to.

use crate::sys;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the socket in its directory.
const SOCKET_NAME: &str = "session.sock";

/// Accepts training processes. Removes its socket file on drop.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    pid: u32,
}

impl Listener {
    /// Listens at `session.sock` in `dir`, which is made (mode 0700) if it is missing.
    ///
    /// The directory is the access control: one that others may enter, that is no real directory or belongs to somebody
    /// else is refused. Processes that connect take the calling process for the engine and end with it. A socket file left behind by a dead listener is replaced.
    pub fn bind(dir: &Path) -> io::Result<Self> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => check_private(dir)?,
        }
        let path = dir.join(SOCKET_NAME);
        remove_stale(&path)?;
        let socket = UnixListener::bind(&path)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path, pid: std::process::id() })
    }

    /// Path of the socket, to be told to the training processes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next process that connects, or `None` if none does within `timeout`.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<UnixStream>> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The process gave up while it waited in the queue, or a signal came.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            sys::poll([(self.socket.as_raw_fd(), libc::POLLIN)], left)?;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A forked child may drop its copy while we go on listening.
        if std::process::id() == self.pid {
            // Nothing useful can be done about a file that is gone already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn check_private(dir: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(dir)?;
    let refuse = |why: &str| {
        let text = format!("session directory {} {why}", dir.display());
        Err(io::Error::new(ErrorKind::PermissionDenied, text))
    };
    // SAFETY: takes no arguments and always succeeds.
    let user = unsafe { libc::geteuid() };
    if !metadata.is_dir() {
        return refuse("is not a directory");
    }
    if metadata.uid() != user {
        return refuse("belongs to another user");
    }
    if metadata.mode() & 0o077 != 0 {
        return refuse("is open to other users (its mode must be 0700)");
    }
    Ok(())
}

/// Makes way for a new socket, unless somebody listens at the old one.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        // Anything else than a socket is not ours to remove; bind will say that it is there.
        Ok(metadata) if !metadata.file_type().is_socket() => return Ok(()),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Ok(_) => Err(io::Error::new(ErrorKind::AddrInUse, format!("another session listens at {}", path.display()))),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn private_dir() -> tempfile::TempDir {
        tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    #[test]
    fn makes_a_private_directory_and_cleans_its_socket_up() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("session");
        let listener = Listener::bind(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        assert_eq!(listener.path(), dir.join("session.sock"));
        drop(listener);
        assert!(!dir.join("session.sock").exists());
    }

    #[test]
    fn refuses_directories_that_are_not_private() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("open");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o750)).unwrap();
        let refused = Listener::bind(&dir).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("0700"), "{refused}");

        let private = root.path().join("private");
        DirBuilder::new().mode(0o700).create(&private).unwrap();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&private, &link).unwrap();
        assert_eq!(Listener::bind(&link).unwrap_err().kind(), ErrorKind::PermissionDenied);

        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(Listener::bind(&file).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn one_listener_per_directory_but_a_dead_one_makes_way() {
        let root = private_dir();
        let first = Listener::bind(root.path()).unwrap();
        assert_eq!(Listener::bind(root.path()).unwrap_err().kind(), ErrorKind::AddrInUse);
        // As if the process had died: the descriptor closes, the file stays.
        let path = first.path().to_owned();
        let stale = root.path().join("kept");
        fs::hard_link(&path, &stale).unwrap();
        drop(first);
        fs::rename(&stale, &path).unwrap();
        Listener::bind(root.path()).unwrap();
    }

    #[test]
    fn a_foreign_file_at_the_socket_path_is_kept() {
        let root = private_dir();
        fs::write(root.path().join("session.sock"), "mine").unwrap();
        assert_eq!(Listener::bind(root.path()).unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(fs::read(root.path().join("session.sock")).unwrap(), b"mine");
    }

    #[test]
    fn accept_gives_up_at_its_timeout() {
        let root = private_dir();
        let listener = Listener::bind(root.path()).unwrap();
        let start = Instant::now();
        assert!(listener.accept(Duration::from_millis(30)).unwrap().is_none());
        assert!(start.elapsed() >= Duration::from_millis(29));
        let _client = UnixStream::connect(listener.path()).unwrap();
        assert!(listener.accept(Duration::ZERO).unwrap().is_some());
    }
}
