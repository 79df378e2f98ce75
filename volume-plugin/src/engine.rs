//! The container engines that use the volume plugin protocol, as far as their requests tell them apart.

/// A container engine. All its containers share one mount of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Sends another ID for each container, and the same one for a container's Mount and Unmount.
    Docker,
    /// Sends one ID for all containers.
    Podman,
}

pub const ENGINES: [Engine; 2] = [Engine::Docker, Engine::Podman];

impl Engine {
    /// The ID that Podman sends with every Mount and Unmount. Podman counts its containers itself, so it is one user of a volume.
    pub const PODMAN_ID: &str = "2f73349cfc4630255319c6c8dfc1b46a8996ace9d14d8e07563b165915918ec2";

    /// Returns the engine that sent a request with this ID.
    pub fn of(id: &str) -> Engine {
        if id == Self::PODMAN_ID { Engine::Podman } else { Engine::Docker }
    }

    /// Returns the engine's name as a consumer of csid's volumes.
    pub fn consumer(self) -> &'static str {
        match self {
            Engine::Docker => "docker",
            Engine::Podman => "podman",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn podmans_id_is_podmans_and_any_other_is_dockers() {
        assert_eq!(Engine::of(Engine::PODMAN_ID), Engine::Podman);
        let random = "b0b5a1ae1bdd31d4f58c2e0b5dd62b6e1cbb3a0ddbf0d8e8e0a5b6a7c8d9e0f1";
        assert_eq!([Engine::of(random), Engine::of("")], [Engine::Docker; 2]);
    }
}
