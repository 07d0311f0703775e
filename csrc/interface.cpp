// Part of every library: the bytes that megatron_merak/_native.py looks for in its file before it is loaded.
namespace merak {

extern __attribute__((used, visibility("default"))) const char interface_of_python[] = "merak interface " MERAK_INTERFACE ";";

}  // namespace merak
