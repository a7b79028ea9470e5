package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// Linked is how many devices the driver shows, and whether it is known that each two of them are joined by a link that carries atomic operations: NVLink. For libraries.
func (d *Device) Linked() (devices int, linked bool) {
	if g, ok := d.plat.(*driverDevice); ok {
		return g.linked()
	}
	return 0, false
}

func (g *driverDevice) linked() (int, bool) {
	n, err := g.drv.DeviceCount()
	if err != nil {
		return 0, false
	}
	devices := make([]cusys.Device, n)
	for i := range devices {
		if devices[i], err = g.drv.Device(i); err != nil {
			return n, false
		}
		for _, peer := range devices[:i] {
			if ok, err := g.drv.PeerAtomics(devices[i], peer); err != nil || !ok {
				return n, false
			}
		}
	}
	return n, n > 1
}

// LinkedTo reports whether the device is joined to another one of the machine, by UUID as in Info, by NVLink, or is it. A device that the driver does not show
// (CUDA_VISIBLE_DEVICES) is looked up with NVIDIA's management library; an error says why it is not known then.
func (d *Device) LinkedTo(uuid string) (bool, error) {
	const op = "look for a link"
	g, ok := d.plat.(*driverDevice)
	if !ok {
		return false, &Error{Op: op, Err: fmt.Errorf("a %s device has none", d.Platform())}
	}
	linked, err := g.linkedTo(uuid)
	if err != nil {
		return false, &Error{Op: op, Detail: "to " + uuid, Err: err}
	}
	return linked, nil
}

func (g *driverDevice) linkedTo(uuid string) (bool, error) {
	if uuid == g.about.UUID && uuid != "" {
		return true, nil
	}
	n, err := g.drv.DeviceCount()
	if err != nil {
		return false, err
	}
	for i := range n {
		dev, err := g.drv.Device(i)
		if err != nil {
			return false, err
		}
		id, err := g.drv.DeviceUUID(dev)
		if err != nil {
			return false, err
		}
		name, err := g.drv.DeviceName(dev)
		if err != nil {
			return false, err
		}
		if uuidText(g.platform, id, name) == uuid {
			return g.drv.PeerAtomics(g.id, dev)
		}
	}
	if g.platform != CUDA {
		return false, errors.New("the driver does not show it")
	}
	nvml, err := cusys.OpenNVML()
	if err != nil {
		return false, fmt.Errorf("the driver does not show it: %s", strings.ReplaceAll(err.Error(), "\n\t", "; "))
	}
	linked, err := nvml.Linked(g.about.UUID, uuid)
	return linked, errors.Join(err, nvml.Close())
}
